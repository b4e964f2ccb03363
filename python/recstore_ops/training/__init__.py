"""Training of click models on embedding tables: data sets, models, metrics and the loop.

`recstore train` is this package on the command line.
"""

from recstore_ops.training.batch import Batch, concatenate, sum_by_row
from recstore_ops.training.config import TrainingConfig
from recstore_ops.training.dataset import (
    CachedRows,
    HeldOutRows,
    MemoryRows,
    RowSource,
    TextRows,
    regroup,
    shuffled,
)
from recstore_ops.training.evaluation import Evaluation, evaluate, predict
from recstore_ops.training.factorization_machine import FactorizationMachine
from recstore_ops.training.input_files import find_input_files
from recstore_ops.training.logistic_regression import LogisticRegression
from recstore_ops.training.loop import Observer, build_model, table_rows, train
from recstore_ops.training.metrics import auc, logloss
from recstore_ops.training.planted import PlantedRows, planted_interactions
from recstore_ops.training.records import EpochRecord, best_record
from recstore_ops.training.run_directory import RunDirectory
from recstore_ops.training.text_format import parse_lines, write_libsvm
from recstore_ops.training.training_input import TrainingInput, open_input

__all__ = [
    "Batch",
    "CachedRows",
    "EpochRecord",
    "Evaluation",
    "FactorizationMachine",
    "HeldOutRows",
    "LogisticRegression",
    "MemoryRows",
    "Observer",
    "PlantedRows",
    "RowSource",
    "RunDirectory",
    "TextRows",
    "TrainingConfig",
    "TrainingInput",
    "auc",
    "best_record",
    "build_model",
    "concatenate",
    "evaluate",
    "find_input_files",
    "logloss",
    "open_input",
    "parse_lines",
    "planted_interactions",
    "predict",
    "regroup",
    "shuffled",
    "sum_by_row",
    "table_rows",
    "train",
    "write_libsvm",
]
