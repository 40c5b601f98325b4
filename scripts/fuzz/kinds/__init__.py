"""The kinds of input that are damaged, one a file."""

from scripts.fuzz.attempt import Attempt
from scripts.fuzz.kinds.adapter_files import AdapterFiles
from scripts.fuzz.kinds.adapter_folders import AdapterFolders
from scripts.fuzz.kinds.callback_states import CallbackStates
from scripts.fuzz.kinds.checkpoints import Checkpoints
from scripts.fuzz.kinds.cli_notes import CLINotes
from scripts.fuzz.kinds.configs import Configs
from scripts.fuzz.kinds.csv_tables import CSVTables
from scripts.fuzz.kinds.external_data import ExternalData
from scripts.fuzz.kinds.images import Images
from scripts.fuzz.kinds.models import Models
from scripts.fuzz.kinds.npz import NumPyFiles
from scripts.fuzz.kinds.parquet import Parquet
from scripts.fuzz.kinds.training_folders import TrainingFolders

KINDS: dict[str, type[Attempt]] = {
    "models": Models,
    "checkpoints": Checkpoints,
    "callback states": CallbackStates,
    "CLI notes": CLINotes,
    "external data": ExternalData,
    "npz": NumPyFiles,
    "csv": CSVTables,
    "parquet": Parquet,
    "images": Images,
    "configs": Configs,
    "adapter folders": AdapterFolders,
    "adapter files": AdapterFiles,
    "training folders": TrainingFolders,
}
