"""Training of click models on embedding tables: readers, models, metrics, the loop and its reports.

`recstore train` is this package on the command line.
"""

from recstore_ops.training import needs_extra  # noqa: F401  isort: skip

from recstore_ops.training.build import build_model, table_rows
from recstore_ops.training.config import TrainingConfig
from recstore_ops.training.finished_run import LoadedRun, load
from recstore_ops.training.formats import open_rows
from recstore_ops.training.generated.criteo import write_criteo
from recstore_ops.training.generated.planted import PlantedRows, planted_interactions, planted_rows
from recstore_ops.training.generated.planted_days import PlantedDay, planted_days, write_planted_days
from recstore_ops.training.generated.planted_retrieval import PlantedRetrieval, planted_retrieval
from recstore_ops.training.generated.planted_sequences import PlantedSequences, planted_sequences
from recstore_ops.training.loop import Observer, train
from recstore_ops.training.models import (
    DCN,
    DIN,
    DLRM,
    DeepFM,
    FactorizationMachine,
    LogisticRegression,
    TwoTower,
    WideAndDeep,
)
from recstore_ops.training.quality.evaluation import Evaluation, Scores, evaluate, predict
from recstore_ops.training.quality.metrics import auc, logloss
from recstore_ops.training.quality.ranking import RankingFigures, ranking_at
from recstore_ops.training.quality.retrieval import Candidates, RankedPart, Retriever, evaluate_retrieval
from recstore_ops.training.report.records import EvaluationRecord, StepRecord, best_record
from recstore_ops.training.report.run_directory import RunDirectory
from recstore_ops.training.rows.batch import Batch, concatenate, sum_by_field, sum_by_row, weighted
from recstore_ops.training.rows.batching import regroup, shuffled
from recstore_ops.training.rows.cached_rows import CachedRows
from recstore_ops.training.rows.hashed_rows import HashedRows, hash_ids
from recstore_ops.training.rows.held_out_rows import HeldOutRows
from recstore_ops.training.rows.input_files import find_input_files
from recstore_ops.training.rows.read_ahead import read_ahead
from recstore_ops.training.rows.row_dataset import RowDataset
from recstore_ops.training.rows.row_source import MappedRows, MemoryRows, RowSource
from recstore_ops.training.rows.sides import Sides
from recstore_ops.training.tables import NnTables, StoreTables, Tables, Vocabulary
from recstore_ops.training.training_input import TrainingInput, open_input

__all__ = [
    "DCN",
    "DIN",
    "DLRM",
    "Batch",
    "CachedRows",
    "Candidates",
    "DeepFM",
    "Evaluation",
    "EvaluationRecord",
    "FactorizationMachine",
    "HashedRows",
    "HeldOutRows",
    "LoadedRun",
    "LogisticRegression",
    "MappedRows",
    "MemoryRows",
    "NnTables",
    "Observer",
    "PlantedDay",
    "PlantedRetrieval",
    "PlantedRows",
    "PlantedSequences",
    "RankedPart",
    "RankingFigures",
    "Retriever",
    "RowDataset",
    "RowSource",
    "RunDirectory",
    "Scores",
    "Sides",
    "StepRecord",
    "StoreTables",
    "Tables",
    "TrainingConfig",
    "TrainingInput",
    "TwoTower",
    "Vocabulary",
    "WideAndDeep",
    "auc",
    "best_record",
    "build_model",
    "concatenate",
    "evaluate",
    "evaluate_retrieval",
    "find_input_files",
    "hash_ids",
    "load",
    "logloss",
    "open_input",
    "open_rows",
    "planted_days",
    "planted_interactions",
    "planted_retrieval",
    "planted_rows",
    "planted_sequences",
    "predict",
    "ranking_at",
    "read_ahead",
    "regroup",
    "shuffled",
    "sum_by_field",
    "sum_by_row",
    "table_rows",
    "train",
    "weighted",
    "write_criteo",
    "write_planted_days",
]
