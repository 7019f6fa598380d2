from nemo_rl.api import EvaluationResult as EvaluationResult
from nemo_rl.api import Trainer as Trainer
from nemo_rl.api import TrainingResult as TrainingResult
from nemo_rl.api import evaluate as evaluate
from nemo_rl.api import load_config as load_config
from nemo_rl.api import train as train

__version__: str
