"""Brings rows into tables and out of them: from `torch.nn`, TorchRec and safetensors, to safetensors and Parquet.

Whole models too: tables in the place of their embeddings, and back.

Only rows are transferred, not optimizer state. An import checks everything before it changes any row. It reads the rows
in parts, so those in a file may be larger than memory. An export has the rows of one moment, while other threads go on.

Shape suffixes: N ids, D dim.
"""

from recstore_ops.transfer.moving import (
    export_parquet,
    export_safetensors,
    export_torchrec,
    from_embedding,
    import_rows,
    import_safetensors,
    import_torchrec,
)
from recstore_ops.transfer.replacing import ReplacedEmbeddings, replace_embeddings
from recstore_ops.transfer.restoring import restore_embeddings

__all__ = [
    "ReplacedEmbeddings",
    "export_parquet",
    "export_safetensors",
    "export_torchrec",
    "from_embedding",
    "import_rows",
    "import_safetensors",
    "import_torchrec",
    "replace_embeddings",
    "restore_embeddings",
]
