"""HF's `accelerate.utils`: everything in the modules below, under one name."""

from anytrain.compat.accelerate import refused
from anytrain.compat.accelerate.utils.constants import *
from anytrain.compat.accelerate.utils.dataclasses import *
from anytrain.compat.accelerate.utils.environment import *
from anytrain.compat.accelerate.utils.imports import *
from anytrain.compat.accelerate.utils.launch import _filter_args as _filter_args
from anytrain.compat.accelerate.utils.memory import *
from anytrain.compat.accelerate.utils.modeling import *
from anytrain.compat.accelerate.utils.operations import *
from anytrain.compat.accelerate.utils.other import *
from anytrain.compat.accelerate.utils.random import *
from anytrain.compat.accelerate.utils.tqdm import *
from anytrain.compat.accelerate.utils.versions import *

__getattr__ = refused.module_getattr(__name__, "parallelism_config", *refused.homes_below("utils"))
