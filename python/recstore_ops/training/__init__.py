"""Training of click models on embedding tables: readers, models, metrics, the loop and its reports.

`recstore train` is this package on the command line.
"""

from recstore_ops.training import needs_extra  # noqa: F401  isort: skip

from recstore_ops.training.data.batch import Batch, concatenate, regroup, shuffled, sum_by_field, sum_by_row, weighted
from recstore_ops.training.data.input_files import find_input_files
from recstore_ops.training.data.opening import open_rows
from recstore_ops.training.data.query_items import QueryItemSplit
from recstore_ops.training.data.read_ahead import RowDataset, read_ahead
from recstore_ops.training.data.row_source import (
    CachedRows,
    HashedRows,
    HeldOutRows,
    MappedRows,
    MemoryRows,
    RowSource,
    hash_ids,
)
from recstore_ops.training.metrics.classification import auc, logloss
from recstore_ops.training.metrics.evaluation import Evaluation, Scores, evaluate, predict
from recstore_ops.training.metrics.retrieval import (
    Candidates,
    RankedPart,
    RankingFigures,
    Retriever,
    evaluate_retrieval,
    ranking_at,
)
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
from recstore_ops.training.models.tables import NnTables, StoreTables, Tables, Vocabulary
from recstore_ops.training.report.records import EvaluationRecord, StepRecord, best_record
from recstore_ops.training.report.run_directory import RunDirectory
from recstore_ops.training.run.build import build_model, table_rows
from recstore_ops.training.run.config import TrainingConfig
from recstore_ops.training.run.finished_run import LoadedRun, load
from recstore_ops.training.run.loop import Observer, train
from recstore_ops.training.run.training_input import TrainingInput, open_input
from recstore_ops.training.synthetic.criteo import write_criteo
from recstore_ops.training.synthetic.days import PlantedDay, planted_days, write_planted_days
from recstore_ops.training.synthetic.planted import PlantedRows, planted_interactions, planted_rows
from recstore_ops.training.synthetic.retrieval import PlantedRetrieval, planted_retrieval
from recstore_ops.training.synthetic.sequences import PlantedSequences, planted_sequences

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
    "QueryItemSplit",
    "RankedPart",
    "RankingFigures",
    "Retriever",
    "RowDataset",
    "RowSource",
    "RunDirectory",
    "Scores",
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
