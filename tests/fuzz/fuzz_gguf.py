"""GGUF files: header, metadata, tokenizer, family, and the rows of every tensor."""

from pathlib import Path

from checkpoints import Sizes, write_tiny
from folders import QWEN35, qwen35_tensors
from gguf import GGMLQuantizationType as Kind
from gguf_files import write_qwen35

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint

SMALL = Sizes(layers=1, hidden=8, inner=8, heads=2, kv_heads=1, context=64)
BLOCKS = Sizes(layers=1, hidden=32, inner=32, heads=2, kv_heads=1, tied=False)
HYBRID = QWEN35 | {
    "hidden_size": 8, "intermediate_size": 8, "head_dim": 8, "linear_key_head_dim": 2, "linear_value_head_dim": 2,
}  # fmt: skip


def seeds(folder: Path) -> None:
    write_tiny(folder / "f32.gguf", SMALL, kind=Kind.F32)
    write_tiny(folder / "f16.gguf", SMALL, kind=Kind.F16)
    write_tiny(folder / "q8.gguf", BLOCKS, kind=Kind.Q8_0)
    write_qwen35(folder / "qwen35.gguf", HYBRID, qwen35_tensors(HYBRID))


def one(data: bytes) -> None:
    path = Path("input.gguf")
    path.write_bytes(data)
    checkpoint = open_checkpoint(path)
    for weight in build(checkpoint).weights():
        for start, stop in weight.spans():
            assert weight.rows(start, stop).nbytes <= 16 * len(data)
