from __future__ import annotations

from epiloq.bench.cli import main

if __name__ == "__main__":
    main()
