"""Methods of transformers that epiloq does not read: what the files hold, and what to do with them."""

from __future__ import annotations

from collections.abc import Mapping

_FLOAT = "or quantise the float model with epiloq"


def _package(method: str, what: str, package: str) -> str:
    return _itself(method, what, f"with the package {package}")


def _itself(method: str, what: str, where: str) -> str:
    return f"expected one that epiloq reads, got {method!r} ({what}): open it by transformers {where}, {_FLOAT}"


METHODS: Mapping[str, str] = {
    "aqlm": _package("aqlm", "sums of entries of trained codebooks", "aqlm"),
    "bitnet": _itself("bitnet", "ternary weights with int8 activations, four a byte", "itself, which needs no package"),
    "eetq": _package("eetq", "int8 weights in the order of a CUDA kernel", "kernels"),
    "fouroversix": _package("fouroversix", "NVFP4 with scales for a maximum of 4 or 6", "fouroversix"),
    "fp_quant": _package("fp_quant", "rotated MXFP4 or NVFP4, whose activations are rotated, too", "fp_quant"),
    "gemma": _itself("gemma", "integers with static scales of inputs and outputs", "itself, which needs no package"),
    "higgs": _package("higgs", "rotated weights in a grid of vectors", "flute"),
    "hqq": _package("hqq", "integers with real zero points, in a package's own tensors", "hqq"),
    "metal": _itself("metal", "integers with real offsets, for Apple's GPUs", "with the package kernels on such a GPU"),
    "nvfp4": "expected one that epiloq reads, got 'nvfp4', by which transformers only quantises float models while it "
    "loads them: save the weights in compressed-tensors or by ModelOpt, whose NVFP4 epiloq reads",
    "optimum-quanto": "expected one that epiloq reads, got 'optimum-quanto' (integers or FP8 in its own tensors, which "
    f"transformers does not open): open it by its QuantizedModelForCausalLM, {_FLOAT}",
    "quanto": _package("quanto", "integers or FP8 in a package's own tensors", "optimum-quanto"),
    "sinq": _package("sinq", "integers with scales of rows and of columns", "sinq"),
    "spqr": _package("spqr", "3-bit weights with outliers in sparse float16", "spqr_quant"),
    "vptq": _package("vptq", "vectors from trained codebooks", "vptq"),
    **{
        f"bitsandbytes_{bits}bit": f"expected bitsandbytes, with load_in_{bits}bit true, got 'bitsandbytes_{bits}bit'"
        for bits in (4, 8)
    },
}
"""The sentence about each of them."""
