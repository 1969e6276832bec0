"""Make a Megatron indexed dataset of real English text, without any download.

The text is the Python standard library's own documentation (`pydoc_data.topics`, several hundred KB). A token is a byte; byte
255, which UTF-8 never uses, ends a document. Megatron's NullTokenizer knows exactly such ids.

    python scripts/prepare_data.py OUT_DIR

writes OUT_DIR/text.bin, text.idx and text.args. The last holds the data and tokenizer arguments that training needs, one a
line; they are printed too. A dataset that is there already is kept.
"""

import argparse
import os
import warnings
from pathlib import Path

END_OF_DOCUMENT = 255


def documents():
    """The topics as byte strings, in a fixed order."""
    from pydoc_data.topics import topics

    return [topics[name].encode() for name in sorted(topics)]


def vocabulary_argument() -> int:
    """The --vocab-size that gives 256 ids with the end of a document at 255: before 0.18 Megatron adds that id itself."""
    from megatron.core.tokenizers.text.libraries.null_tokenizer import NullTokenizer

    size = 256 if NullTokenizer(256).eod == END_OF_DOCUMENT else 255
    assert NullTokenizer(size).eod == END_OF_DOCUMENT and NullTokenizer(size).vocab_size == 256
    return size


def write_dataset(prefix: Path):
    """Write PREFIX.bin and PREFIX.idx (the index last: it is what says that the dataset is whole)."""
    import numpy
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    unfinished = prefix.with_name(f"{prefix.name}.{os.getpid()}")
    builder = IndexedDatasetBuilder(f"{unfinished}.bin", dtype=numpy.uint16)
    for text in documents():
        tokens = torch.tensor([*text, END_OF_DOCUMENT])
        builder.add_document(tokens, [len(tokens)])
    builder.finalize(f"{unfinished}.idx")
    for suffix in (".bin", ".idx"):
        os.replace(f"{unfinished}{suffix}", f"{prefix}{suffix}")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out_dir", type=Path, help="folder of the dataset; made if need be")
    out_dir = parser.parse_args().out_dir.resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    prefix = out_dir / "text"
    warnings.filterwarnings("ignore")  # Megatron's imports tell of optional packages
    if not prefix.with_name("text.idx").exists():
        write_dataset(prefix)
    arguments = [
        "--data-path", str(prefix),
        "--data-cache-path", str(out_dir / "cache"),
        "--split", "90,5,5",
        "--tokenizer-type", "NullTokenizer",
        "--vocab-size", str(vocabulary_argument()),
    ]  # fmt: skip
    prefix.with_name("text.args").write_text("\n".join(arguments) + "\n")
    print(*arguments)


if __name__ == "__main__":
    main()
