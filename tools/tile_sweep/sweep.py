"""Times SM90 tiles that are not in the tables yet; needs a GPU, nvcc and CUTLASS's headers.

    python tools/tile_sweep/sweep.py --cutlass DIR "swap 64x16x256 c1x1 W" "256x128x128 c2x1 C" ... \
        [--kind int8|float8|groupwise|float8-rows|int8-rows] [--shapes 6144x4096,8192x8192] [--tokens 1,16,64]
        [--before CHECKOUT: also time its tiles] [--deep-gemm DIR: with --kind groupwise, also DeepGEMM's kernel]

A tile is given as "[fast] [swap] MxNxK cCMxCN W|P|C", in which cCMxCN is the cluster and W, P or C the schedule
(warp-specialised, ping-pong, cooperative). A tile of the group-wise kernel, which also runs scales per row, is given as
"mM nN [k2] [split]": k2 has two warpgroups along K; split uses split-K for the tiles of a last, partial wave, if the
tile supports it. m64 to m192 are one to three warpgroups, m256 two rounds of two.
Tiles compile in parallel, about 40 core-seconds each; one that does not compile is reported and skipped. Times are
printed in microseconds and, in brackets, in thousands of cycles: at the power limit only the latter are reproducible.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SCHEDULES = {"W": "kWarpSpecialized", "P": "kPingpong", "C": "kCooperative"}
SHAPES = "6144x4096,28672x4096,4096x14336,2112x7168,24576x1536,7168x16384,8192x8192"
TILE = re.compile(r"(fast )?(swap )?(\d+)x(\d+)x(\d+) c(\d+)x(\d+) ([WPC])")
GROUPWISE = re.compile(r"m(\d+) n(\d+)(?: k(\d))?( split)?")


@dataclass(frozen=True)
class Kind:
    """The timing program for a kind of tiles, the source of a tile, and its macros."""

    main: str
    tile: str
    problem: str
    defines: dict[str, str]


def groupwise_kind(element: str, cutlass_element: str, *, per_row_scales: bool) -> Kind:
    """Tiles of sm90/groupwise_gemm.cuh."""
    defines = {
        "ELEMENT": element,
        "CUTLASS_ELEMENT": cutlass_element,
        "SCALES": "kPerRowScales" if per_row_scales else "kBlocks",
        "PER_ROW_SCALES": str(per_row_scales).lower(),
    }
    return Kind("groupwise_main.cu", "groupwise.cu", "GroupwiseProblem", defines)


KINDS = {
    "int8": Kind("main.cu", "tile.cu", "Problem", {"OPERAND": "kInt8", "FLOAT8": "0"}),
    "float8": Kind("main.cu", "tile.cu", "Problem", {"OPERAND": "kFloat8E4M3", "FLOAT8": "1"}),
    "groupwise": groupwise_kind("__nv_fp8_e4m3", "cutlass::float_e4m3_t", per_row_scales=False),
    "float8-rows": groupwise_kind("__nv_fp8_e4m3", "cutlass::float_e4m3_t", per_row_scales=True),
    "int8-rows": groupwise_kind("std::int8_t", "std::int8_t", per_row_scales=True),
}


def macros(tile: str, kind: Kind) -> dict[str, str]:
    """The macros of a tile's source."""
    name = {"NAME": "tile_" + re.sub(r"\W", "_", tile), **kind.defines}
    if kind.tile == "groupwise.cu":
        match = GROUPWISE.fullmatch(tile)
        if match is None:
            raise SystemExit(f'sweep: tile: expected such as "m256 n128" or "m64 n48 k2", got {tile!r}')
        m, n, k, split = match.groups()
        return name | {
            "M_GROUPS": "2" if int(m) == 256 else str(int(m) // 64),
            "ROUNDS": "2" if int(m) == 256 else "1",
            "K_GROUPS": k or "1",
            "TILE_N": n,
            "SPLIT_K": "true" if split else "false",
        }
    match = TILE.fullmatch(tile)
    if match is None:
        raise SystemExit(f'sweep: tile: expected such as "swap 64x16x256 c1x1 W", got {tile!r}')
    fast, swap, m, n, k, cluster_m, cluster_n, schedule = match.groups()
    return name | {
        "TILE_M": m,
        "TILE_N": n,
        "TILE_K": k,
        "CLUSTER_M": cluster_m,
        "CLUSTER_N": cluster_n,
        "SCHEDULE": SCHEDULES[schedule],
        "SWAP": "true" if swap else "false",
        "FAST_ACCUM": "true" if fast else "false",
    }


@dataclass(frozen=True)
class Contender:
    """A tile: its printed form, macros, source file and include folders."""

    text: str
    values: dict[str, str]
    source: Path
    includes: list[Path]

    @property
    def name(self) -> str:
        return self.values["NAME"]


def of_checkout(root: Path, tile: str, kind: Kind, prefix: str = "") -> Contender:
    values = macros(tile, kind)
    values["NAME"] = re.sub(r"\W", "_", prefix) + values["NAME"]
    source = root / "tools" / "tile_sweep" / kind.tile
    return Contender(prefix + tile, values, source, [root / "include", root / "src", source.parent])


def deep_gemm(headers: Path, shapes: str, folder: Path) -> Contender:
    """DeepGEMM's kernel, whose headers include their own CUTLASS. Sizes are in a file, as nvcc splits -D at commas."""
    folder.mkdir(parents=True, exist_ok=True)
    sizes = [f"SHAPE({shape.replace('x', ', ')})\n" for shape in shapes.split(",")]
    (folder / "shapes.inc").write_text("".join(sizes))
    includes = [headers, ROOT / "include", ROOT / "src", folder]
    return Contender("DeepGEMM", {"NAME": "tile_deep_gemm"}, HERE / "deep_gemm.cu", includes)


def nvcc(includes: list[Path], *arguments: str) -> subprocess.CompletedProcess[str]:
    flags = ["-std=c++20", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr", "--expt-extended-lambda", "-w"]
    flags += ["-DCUTLASS_ENABLE_GDC_FOR_SM90=1"]
    flags += ["-DEPILOQ_HAS_CUDA=1", *(f"-DEPILOQ_HAS_SM{arch}=0" for arch in (75, 80, 89, 90))]
    target = ["-gencode", "arch=compute_90a,code=sm_90a"]
    command = ["nvcc", *flags, *target, *(f"-I{path}" for path in includes), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def build(contenders: list[Contender], kind: Kind, cutlass: Path, folder: Path) -> Path:
    """Compile every tile and link the program; returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    flags = [f"-D{name}={value}" for name, value in kind.defines.items()]

    def compile_tile(tile: Contender) -> Contender | None:
        defines = [f"-D{name}={value}" for name, value in tile.values.items()]
        target = folder / f"{tile.name}.o"
        includes = [*tile.includes, cutlass / "include"]
        result = nvcc(includes, *defines, "-c", str(tile.source), "-o", str(target))
        if result.returncode:
            print(f"sweep: {tile.text} does not build:\n{result.stderr[-400:]}", file=sys.stderr)
            return None
        return tile

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        built = [tile for tile in pool.map(compile_tile, contenders) if tile]
    lines = [f"void {tile.name}({kind.problem} const&, int, epiloq::Stream);" for tile in built]
    lines += ["static Tile const kTiles[] = {", *(f'    {{"{tile.text}", {tile.name}}},' for tile in built), "};"]
    (folder / "tiles.inc").write_text("\n".join(lines) + "\n")
    objects = [str(folder / f"{tile.name}.o") for tile in built]
    program = folder / "sweep"
    sources = [str(HERE / kind.main), str(ROOT / "src/core/device.cpp")]
    includes = [ROOT / "include", ROOT / "src", HERE, folder, cutlass / "include"]
    result = nvcc(includes, *flags, *sources, *objects, "-o", str(program))
    if result.returncode:
        raise SystemExit(f"sweep: the program does not link:\n{result.stderr[-2000:]}")
    return program


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tiles", nargs="+")
    parser.add_argument("--cutlass", type=Path, required=True, help="CUTLASS's sources, which contain include/")
    parser.add_argument("--kind", choices=KINDS, default="int8")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--tokens", default="1,16,32,64,128,256,1024,4096")
    parser.add_argument("--settle", type=float, default=6, help="ms for which a tile runs before it is timed")
    parser.add_argument("--before", type=Path, help="another checkout whose tiles are also compiled and timed")
    parser.add_argument("--deep-gemm", type=Path, help="sgl-deep-gemm's headers: the folder that contains deep_gemm/")
    parser.add_argument("--build-only", action="store_true")
    options = parser.parse_args()
    kind, folder = KINDS[options.kind], ROOT / "build" / "tile-sweep" / options.kind
    contenders = [of_checkout(ROOT, tile, kind) for tile in options.tiles]
    if options.before:
        contenders += [of_checkout(options.before, tile, kind, "before: ") for tile in options.tiles]
    if options.deep_gemm:
        if options.kind != "groupwise":
            raise SystemExit(f"sweep: --deep-gemm: expected --kind groupwise, got {options.kind}")
        contenders.append(deep_gemm(options.deep_gemm, options.shapes, folder))
    program = build(contenders, kind, options.cutlass, folder)
    if not options.build_only:
        subprocess.run([str(program), options.shapes, options.tokens, str(options.settle)], check=True)


if __name__ == "__main__":
    main()
