"""GGUF files: header, metadata, tokenizer, family, and the rows of every tensor."""

from pathlib import Path

from checkpoints import Sizes, write_tiny
from gguf import GGMLQuantizationType as Kind

from ferrule_convert.archs import build
from ferrule_convert.checkpoint import open_checkpoint

SMALL = Sizes(layers=1, hidden=8, inner=8, heads=2, kv_heads=1, context=64)


def seeds(folder: Path) -> None:
    write_tiny(folder / "f32.gguf", SMALL, kind=Kind.F32)
    write_tiny(folder / "f16.gguf", SMALL, kind=Kind.F16)
    write_tiny(
        folder / "q8.gguf", Sizes(layers=1, hidden=32, inner=32, heads=2, kv_heads=1, tied=False), kind=Kind.Q8_0
    )


def one(data: bytes) -> None:
    path = Path("input.gguf")
    path.write_bytes(data)
    checkpoint = open_checkpoint(path)
    for weight in build(checkpoint).weights():
        for _, rows in weight.blocks():
            assert rows.nbytes <= 16 * len(data)
