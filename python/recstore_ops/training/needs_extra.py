"""Says what is missing, before an import of this room fails somewhere within."""

from recstore_ops.config.extras import require

require("train", "recstore_ops.training")
