"""The public API for extensions. Other packages may import from here and from `gracetune.gh200`; names here are stable,
while other modules may move.

from gracetune.extension import OptimizerRecord, class_of, per_element

docs/extending.md describes what a model family, an optimizer, a dataset backend and other extensions consist of. A test
checks that overlays/ and examples/ import nothing else.

Each name is imported from its own module on first use. A module that is loaded for checking a config can therefore
import from here without importing torch.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from gracetune import __version__ as __version__
    from gracetune.adapters.adapter_files import open_adapter as open_adapter
    from gracetune.adapters.adapter_files import save as _save_adapter
    from gracetune.adapters.algorithms.record import Algorithm as _AdapterAlgorithm
    from gracetune.adapters.algorithms.record import FirstValues as _AdapterFirstValues
    from gracetune.adapters.algorithms.record import Options as _AdapterOptions
    from gracetune.adapters.algorithms.record import Tensors as _AdapterTensors
    from gracetune.adapters.algorithms.record import WeightShape as WeightShape
    from gracetune.adapters.computation import Computation as _AdapterComputation
    from gracetune.adapters.formats.record import FORMATS as FORMATS
    from gracetune.adapters.formats.record import Format as _ExportFormat
    from gracetune.adapters.options import LayerOptions as LayerOptions
    from gracetune.adapters.safetensors_file import write as _write_adapter_tensors
    from gracetune.adapters.state import AdapterState as AdapterState
    from gracetune.adapters.state import ExpertStage as ExpertStage
    from gracetune.adapters.state import Layer as _AdapterLayer
    from gracetune.adapters.statistics import norms as _adapter_norms
    from gracetune.cache.encoder import Entry as Entry
    from gracetune.cache.encoder import LatentEncoder as LatentEncoder
    from gracetune.cache.encoder import Prompt as Prompt
    from gracetune.cache.encoder import TextEncoder as TextEncoder
    from gracetune.cache.residence import CacheResources as _CacheResources
    from gracetune.cache.residence import CacheRole as CacheRole
    from gracetune.cache.residence import CacheType as CacheType
    from gracetune.cache.residence import Residence as Residence
    from gracetune.cache.residence import choose_residence as choose_residence
    from gracetune.checkpoint.state_parts import CheckpointPart as _CheckpointPart
    from gracetune.checkpoint.state_parts import SavedState as _SavedPart
    from gracetune.config.base import Flag as Flag
    from gracetune.config.base import PositiveFloat as PositiveFloat
    from gracetune.config.base import Section as Section
    from gracetune.config.dataset_config import Dataset as Dataset
    from gracetune.config.dialects.gh200 import read_guide_options as read_guide_options
    from gracetune.config.draft import Draft as Draft
    from gracetune.config.draft import Origin as Origin
    from gracetune.config.environment import ALLOCATOR_VARIABLES as ALLOCATOR_VARIABLES
    from gracetune.config.environment import Environment as Environment
    from gracetune.config.environment import claim_allocator_options as claim_allocator_options
    from gracetune.config.environment import memory_settings as memory_settings
    from gracetune.config.environment import torch_accepts_uvm_options as torch_accepts_uvm_options
    from gracetune.config.family_names import AiToolkitNames as AiToolkitNames
    from gracetune.config.family_names import Arch as Arch
    from gracetune.config.family_names import ClipLength as ClipLength
    from gracetune.config.family_names import DefaultVae as DefaultVae
    from gracetune.config.family_names import FamilyNames as FamilyNames
    from gracetune.config.family_names import Flavour as Flavour
    from gracetune.config.family_names import LoraTargets as LoraTargets
    from gracetune.config.family_names import RejectedFlavour as RejectedFlavour
    from gracetune.config.family_names import ShiftPoints as ShiftPoints
    from gracetune.config.family_names import SimpleTunerNames as SimpleTunerNames
    from gracetune.config.memory_options import OPTION_NAMES as _ALLOCATOR_OPTIONS
    from gracetune.config.memory_options import MemoryOptions as MemoryOptions
    from gracetune.config.run_config import BatchRamp as BatchRamp
    from gracetune.config.run_config import Cache as Cache
    from gracetune.config.run_config import RunConfig as RunConfig
    from gracetune.config.run_config import Training as Training
    from gracetune.config.spelling import misspelt as misspelt
    from gracetune.data.backend import Backend as Backend
    from gracetune.data.backend import FileStat as FileStat
    from gracetune.data.backend import Listing as _FileListing
    from gracetune.data.backends.in_memory import InMemoryBackend as InMemoryBackend
    from gracetune.data.backends.open import open_backend as open_backend
    from gracetune.data.backends.record import DatasetBackend as DatasetBackend
    from gracetune.data.backends.record import Opening as Opening
    from gracetune.data.backends.storage import Storage as Storage
    from gracetune.data.errors import MissingFileError as MissingFileError
    from gracetune.data.media.load import Sample as Sample
    from gracetune.data.media.load import to_pixels as to_pixels
    from gracetune.data.refs import AppliedAugmentation as AppliedAugmentation
    from gracetune.data.refs import Bucket as Bucket
    from gracetune.data.refs import CaptionRef as CaptionRef
    from gracetune.data.refs import Fit as Fit
    from gracetune.data.refs import SampleRef as SampleRef
    from gracetune.diffusion.schedule import Ddpm as Ddpm
    from gracetune.diffusion.schedule import Flow as Flow
    from gracetune.diffusion.schedule import NoiseSchedule as NoiseSchedule
    from gracetune.errors import ConfigError as ConfigError
    from gracetune.errors import GracetuneError as GracetuneError
    from gracetune.errors import MachineError as MachineError
    from gracetune.errors import Problem as Problem
    from gracetune.hardware import probe as probe
    from gracetune.hardware.allocation import host_reserve as host_reserve
    from gracetune.hardware.machine import Machine as Machine
    from gracetune.hostmem.sensors import HostSensor as HostSensor
    from gracetune.hostmem.sharing import LocalRanks as LocalRanks
    from gracetune.hostmem.slab import MemorySlab as MemorySlab
    from gracetune.hostmem.slab import Slab as Slab
    from gracetune.memory.errors import MemoryPressure as MemoryPressure
    from gracetune.memory.errors import UnifiedMemoryError as UnifiedMemoryError
    from gracetune.memory.managed import ManagedHeap as ManagedHeap
    from gracetune.memory.managed import ManagedSlab as ManagedSlab
    from gracetune.memory.native import Unavailable as Unavailable
    from gracetune.memory.unified_memory import UnifiedMemory as UnifiedMemory
    from gracetune.models.common.encoding import TruncatedTexts as TruncatedTexts
    from gracetune.models.common.encoding import encoder_id as encoder_id
    from gracetune.models.common.encoding import padded_tokens as padded_tokens
    from gracetune.models.common.flow_shift import read_shift as read_shift
    from gracetune.models.common.image_latents import ImageCodec as _ImageCodec
    from gracetune.models.common.image_latents import ImageLatents as ImageLatents
    from gracetune.models.common.pipelines import PipelineText as PipelineText
    from gracetune.models.common.pipelines import assemble as _assemble_pipeline
    from gracetune.models.common.sample_checks import checked_size as checked_size
    from gracetune.models.common.sample_checks import reject_references as reject_references
    from gracetune.models.common.tiny_parts import WIDTH as _TINY_WIDTH
    from gracetune.models.common.tiny_parts import TinyWeights as _TinyWeights
    from gracetune.models.common.tiny_parts import build_part as _build_part
    from gracetune.models.common.tiny_parts import save as _save_tiny
    from gracetune.models.common.tiny_parts import t5_options as t5_options
    from gracetune.models.common.tiny_parts import t5_tokenizer as t5_tokenizer
    from gracetune.models.fingerprint import files_digest as files_digest
    from gracetune.models.footprint import Footprint as Footprint
    from gracetune.models.footprint import FootprintBlock as _FootprintBlock
    from gracetune.models.footprint import FootprintCodec as _FootprintCodec
    from gracetune.models.footprint import FootprintEncoder as _FootprintEncoder
    from gracetune.models.footprint import FootprintKept as _FootprintKept
    from gracetune.models.footprint import FootprintLinear as _FootprintLinear
    from gracetune.models.footprint import FootprintStream as _FootprintStream
    from gracetune.models.footprint import FootprintText as _FootprintText
    from gracetune.models.footprint import PixelLatents as PixelLatents
    from gracetune.models.footprint import geometry_from as geometry_from
    from gracetune.models.keys import KeyMap as KeyMap
    from gracetune.models.keys import KeyMapRule as _KeyMapRule
    from gracetune.models.layout import CONFIG as _CONFIG_FILE
    from gracetune.models.layout import SCHEDULER as SCHEDULER
    from gracetune.models.layout import TOKENIZER as TOKENIZER
    from gracetune.models.layout import part_config as part_config
    from gracetune.models.layout import pipeline_name as pipeline_name
    from gracetune.models.layout import read_config as read_config
    from gracetune.models.layout import require_parts as require_parts
    from gracetune.models.loading import build_component as build_component
    from gracetune.models.loading import load_component as load_component
    from gracetune.models.loading import load_text_model as load_text_model
    from gracetune.models.source import ModelSource as ModelSource
    from gracetune.models.spec import AttentionCalls as AttentionCalls
    from gracetune.models.spec import EncodeOptions as EncodeOptions
    from gracetune.models.spec import Expert as Expert
    from gracetune.models.spec import ModelFacts as ModelFacts
    from gracetune.models.spec import ModelSpec as ModelSpec
    from gracetune.models.spec import PartPlacement as PartPlacement
    from gracetune.models.spec import Sampled as Sampled
    from gracetune.models.spec import SampleRequest as SampleRequest
    from gracetune.models.tiny import cached as _tiny_model
    from gracetune.optim.automagic import Automagic as Automagic
    from gracetune.optim.batch_ramp import Ramp as Ramp
    from gracetune.optim.batch_ramp import StepBatch as _StepBatch
    from gracetune.optim.batch_ramp import ramp_of as ramp_of
    from gracetune.optim.element_rates import KeepsRates as KeepsRates
    from gracetune.optim.element_rates import RateGrid as RateGrid
    from gracetune.optim.element_rates import RateLimits as _RateLimits
    from gracetune.optim.named_state import KeepsNamedState as KeepsNamedState
    from gracetune.optim.named_state import NamedState as NamedState
    from gracetune.optim.named_state import StateMismatchError as StateMismatchError
    from gracetune.optim.record import OptimizerRecord as OptimizerRecord
    from gracetune.optim.record import ParamGroup as ParamGroup
    from gracetune.optim.record import StateSize as StateSize
    from gracetune.optim.record import TrainedTensors as TrainedTensors
    from gracetune.optim.record import class_of as class_of
    from gracetune.optim.record import per_element as per_element
    from gracetune.planning.tracing.store import with_blocks as _traced_footprint
    from gracetune.storage.atomic import sync_folder as sync_folder
    from gracetune.storage.atomic import write_file as write_file
    from gracetune.storage.safetensors_headers import WeightFileError as WeightFileError
    from gracetune.storage.safetensors_headers import open_weights as open_weights
    from gracetune.telemetry.dispatcher import Sink as Sink
    from gracetune.telemetry.dispatcher import TrackedRun as TrackedRun
    from gracetune.telemetry.dispatcher import Tracker as Tracker
    from gracetune.telemetry.events import Event as Event
    from gracetune.telemetry.events import Record as Record
    from gracetune.telemetry.events import StepDone as StepDone
    from gracetune.train.run import RunOptions as RunOptions
    from gracetune.train.run import train as train
    from gracetune.train.view import View as View
    from gracetune.units import GIB as GIB
    from gracetune.units import format_bytes as format_bytes

    ALLOCATOR_OPTIONS = _ALLOCATOR_OPTIONS
    AdapterAlgorithm = _AdapterAlgorithm
    AdapterComputation = _AdapterComputation
    AdapterFirstValues = _AdapterFirstValues
    AdapterLayer = _AdapterLayer
    AdapterOptions = _AdapterOptions
    AdapterTensors = _AdapterTensors
    CONFIG_FILE = _CONFIG_FILE
    CacheResources = _CacheResources
    CheckpointPart = _CheckpointPart
    ExportFormat = _ExportFormat
    FileListing = _FileListing
    FootprintBlock = _FootprintBlock
    FootprintCodec = _FootprintCodec
    FootprintEncoder = _FootprintEncoder
    FootprintKept = _FootprintKept
    FootprintLinear = _FootprintLinear
    FootprintStream = _FootprintStream
    FootprintText = _FootprintText
    traced_footprint = _traced_footprint
    KeyMapRule = _KeyMapRule
    ImageCodec = _ImageCodec
    StepBatch = _StepBatch
    RateLimits = _RateLimits
    SavedPart = _SavedPart
    TINY_WIDTH = _TINY_WIDTH
    TinyWeights = _TinyWeights
    adapter_norms = _adapter_norms
    assemble_pipeline = _assemble_pipeline
    build_part = _build_part
    save_adapter = _save_adapter
    save_tiny = _save_tiny
    tiny_model = _tiny_model
    write_adapter_tensors = _write_adapter_tensors

_HOMES: Final[Mapping[str, str]] = {
    # errors, units, files
    "__version__": "gracetune:__version__",
    "ConfigError": "gracetune.errors:ConfigError",
    "GracetuneError": "gracetune.errors:GracetuneError",
    "MachineError": "gracetune.errors:MachineError",
    "Problem": "gracetune.errors:Problem",
    "sync_folder": "gracetune.storage.atomic:sync_folder",
    "write_file": "gracetune.storage.atomic:write_file",
    "WeightFileError": "gracetune.storage.safetensors_headers:WeightFileError",
    "open_weights": "gracetune.storage.safetensors_headers:open_weights",
    "format_bytes": "gracetune.units:format_bytes",
    "GIB": "gracetune.units:GIB",
    # configs and their dialects
    "ALLOCATOR_OPTIONS": "gracetune.config.memory_options:OPTION_NAMES",
    "Flag": "gracetune.config.base:Flag",
    "PositiveFloat": "gracetune.config.base:PositiveFloat",
    "Section": "gracetune.config.base:Section",
    "Dataset": "gracetune.config.dataset_config:Dataset",
    "read_guide_options": "gracetune.config.dialects.gh200:read_guide_options",
    "Draft": "gracetune.config.draft:Draft",
    "Origin": "gracetune.config.draft:Origin",
    "ALLOCATOR_VARIABLES": "gracetune.config.environment:ALLOCATOR_VARIABLES",
    "claim_allocator_options": "gracetune.config.environment:claim_allocator_options",
    "Environment": "gracetune.config.environment:Environment",
    "memory_settings": "gracetune.config.environment:memory_settings",
    "torch_accepts_uvm_options": "gracetune.config.environment:torch_accepts_uvm_options",
    "AiToolkitNames": "gracetune.config.family_names:AiToolkitNames",
    "Arch": "gracetune.config.family_names:Arch",
    "ClipLength": "gracetune.config.family_names:ClipLength",
    "DefaultVae": "gracetune.config.family_names:DefaultVae",
    "FamilyNames": "gracetune.config.family_names:FamilyNames",
    "Flavour": "gracetune.config.family_names:Flavour",
    "LoraTargets": "gracetune.config.family_names:LoraTargets",
    "RejectedFlavour": "gracetune.config.family_names:RejectedFlavour",
    "ShiftPoints": "gracetune.config.family_names:ShiftPoints",
    "SimpleTunerNames": "gracetune.config.family_names:SimpleTunerNames",
    "MemoryOptions": "gracetune.config.memory_options:MemoryOptions",
    "BatchRamp": "gracetune.config.run_config:BatchRamp",
    "Cache": "gracetune.config.run_config:Cache",
    "RunConfig": "gracetune.config.run_config:RunConfig",
    "Training": "gracetune.config.run_config:Training",
    "misspelt": "gracetune.config.spelling:misspelt",
    # machines and memory
    "CacheResources": "gracetune.cache.residence:CacheResources",
    "CacheRole": "gracetune.cache.residence:CacheRole",
    "CacheType": "gracetune.cache.residence:CacheType",
    "choose_residence": "gracetune.cache.residence:choose_residence",
    "Residence": "gracetune.cache.residence:Residence",
    "probe": "gracetune.hardware:probe",
    "host_reserve": "gracetune.hardware.allocation:host_reserve",
    "Machine": "gracetune.hardware.machine:Machine",
    "HostSensor": "gracetune.hostmem.sensors:HostSensor",
    "LocalRanks": "gracetune.hostmem.sharing:LocalRanks",
    "MemorySlab": "gracetune.hostmem.slab:MemorySlab",
    "Slab": "gracetune.hostmem.slab:Slab",
    "MemoryPressure": "gracetune.memory.errors:MemoryPressure",
    "UnifiedMemoryError": "gracetune.memory.errors:UnifiedMemoryError",
    "UnifiedMemory": "gracetune.memory.unified_memory:UnifiedMemory",
    "ManagedHeap": "gracetune.memory.managed:ManagedHeap",
    "ManagedSlab": "gracetune.memory.managed:ManagedSlab",
    "Unavailable": "gracetune.memory.native:Unavailable",
    # data and caches
    "Entry": "gracetune.cache.encoder:Entry",
    "LatentEncoder": "gracetune.cache.encoder:LatentEncoder",
    "Prompt": "gracetune.cache.encoder:Prompt",
    "TextEncoder": "gracetune.cache.encoder:TextEncoder",
    "Backend": "gracetune.data.backend:Backend",
    "FileStat": "gracetune.data.backend:FileStat",
    "InMemoryBackend": "gracetune.data.backends.in_memory:InMemoryBackend",
    "FileListing": "gracetune.data.backend:Listing",
    "open_backend": "gracetune.data.backends.open:open_backend",
    "DatasetBackend": "gracetune.data.backends.record:DatasetBackend",
    "Opening": "gracetune.data.backends.record:Opening",
    "Storage": "gracetune.data.backends.storage:Storage",
    "MissingFileError": "gracetune.data.errors:MissingFileError",
    "Sample": "gracetune.data.media.load:Sample",
    "to_pixels": "gracetune.data.media.load:to_pixels",
    "AppliedAugmentation": "gracetune.data.refs:AppliedAugmentation",
    "Bucket": "gracetune.data.refs:Bucket",
    "CaptionRef": "gracetune.data.refs:CaptionRef",
    "Fit": "gracetune.data.refs:Fit",
    "SampleRef": "gracetune.data.refs:SampleRef",
    # noise schedules
    "Ddpm": "gracetune.diffusion.schedule:Ddpm",
    "Flow": "gracetune.diffusion.schedule:Flow",
    "NoiseSchedule": "gracetune.diffusion.schedule:NoiseSchedule",
    # model families
    "encoder_id": "gracetune.models.common.encoding:encoder_id",
    "files_digest": "gracetune.models.fingerprint:files_digest",
    "read_shift": "gracetune.models.common.flow_shift:read_shift",
    "ImageCodec": "gracetune.models.common.image_latents:ImageCodec",
    "ImageLatents": "gracetune.models.common.image_latents:ImageLatents",
    "assemble_pipeline": "gracetune.models.common.pipelines:assemble",
    "PipelineText": "gracetune.models.common.pipelines:PipelineText",
    "TruncatedTexts": "gracetune.models.common.encoding:TruncatedTexts",
    "padded_tokens": "gracetune.models.common.encoding:padded_tokens",
    "checked_size": "gracetune.models.common.sample_checks:checked_size",
    "reject_references": "gracetune.models.common.sample_checks:reject_references",
    "build_part": "gracetune.models.common.tiny_parts:build_part",
    "save_tiny": "gracetune.models.common.tiny_parts:save",
    "t5_options": "gracetune.models.common.tiny_parts:t5_options",
    "t5_tokenizer": "gracetune.models.common.tiny_parts:t5_tokenizer",
    "TINY_WIDTH": "gracetune.models.common.tiny_parts:WIDTH",
    "TinyWeights": "gracetune.models.common.tiny_parts:TinyWeights",
    "Footprint": "gracetune.models.footprint:Footprint",
    "FootprintBlock": "gracetune.models.footprint:FootprintBlock",
    "FootprintCodec": "gracetune.models.footprint:FootprintCodec",
    "FootprintEncoder": "gracetune.models.footprint:FootprintEncoder",
    "FootprintKept": "gracetune.models.footprint:FootprintKept",
    "FootprintLinear": "gracetune.models.footprint:FootprintLinear",
    "FootprintStream": "gracetune.models.footprint:FootprintStream",
    "FootprintText": "gracetune.models.footprint:FootprintText",
    "traced_footprint": "gracetune.planning.tracing.store:with_blocks",
    "PixelLatents": "gracetune.models.footprint:PixelLatents",
    "geometry_from": "gracetune.models.footprint:geometry_from",
    "KeyMap": "gracetune.models.keys:KeyMap",
    "KeyMapRule": "gracetune.models.keys:KeyMapRule",
    "CONFIG_FILE": "gracetune.models.layout:CONFIG",
    "part_config": "gracetune.models.layout:part_config",
    "pipeline_name": "gracetune.models.layout:pipeline_name",
    "read_config": "gracetune.models.layout:read_config",
    "require_parts": "gracetune.models.layout:require_parts",
    "SCHEDULER": "gracetune.models.layout:SCHEDULER",
    "TOKENIZER": "gracetune.models.layout:TOKENIZER",
    "build_component": "gracetune.models.loading:build_component",
    "load_component": "gracetune.models.loading:load_component",
    "load_text_model": "gracetune.models.loading:load_text_model",
    "ModelSource": "gracetune.models.source:ModelSource",
    "AttentionCalls": "gracetune.models.spec:AttentionCalls",
    "EncodeOptions": "gracetune.models.spec:EncodeOptions",
    "Expert": "gracetune.models.spec:Expert",
    "ModelFacts": "gracetune.models.spec:ModelFacts",
    "ModelSpec": "gracetune.models.spec:ModelSpec",
    "PartPlacement": "gracetune.models.spec:PartPlacement",
    "Sampled": "gracetune.models.spec:Sampled",
    "SampleRequest": "gracetune.models.spec:SampleRequest",
    "tiny_model": "gracetune.models.tiny:cached",
    # adapters and their files
    "AdapterAlgorithm": "gracetune.adapters.algorithms.record:Algorithm",
    "AdapterFirstValues": "gracetune.adapters.algorithms.record:FirstValues",
    "AdapterOptions": "gracetune.adapters.algorithms.record:Options",
    "AdapterTensors": "gracetune.adapters.algorithms.record:Tensors",
    "WeightShape": "gracetune.adapters.algorithms.record:WeightShape",
    "AdapterComputation": "gracetune.adapters.computation:Computation",
    "write_adapter_tensors": "gracetune.adapters.safetensors_file:write",
    "ExportFormat": "gracetune.adapters.formats.record:Format",
    "FORMATS": "gracetune.adapters.formats.record:FORMATS",
    "open_adapter": "gracetune.adapters.adapter_files:open_adapter",
    "save_adapter": "gracetune.adapters.adapter_files:save",
    "LayerOptions": "gracetune.adapters.options:LayerOptions",
    "AdapterLayer": "gracetune.adapters.state:Layer",
    "AdapterState": "gracetune.adapters.state:AdapterState",
    "ExpertStage": "gracetune.adapters.state:ExpertStage",
    "adapter_norms": "gracetune.adapters.statistics:norms",
    # optimizers
    "Automagic": "gracetune.optim.automagic:Automagic",
    "KeepsNamedState": "gracetune.optim.named_state:KeepsNamedState",
    "NamedState": "gracetune.optim.named_state:NamedState",
    "StateMismatchError": "gracetune.optim.named_state:StateMismatchError",
    "Ramp": "gracetune.optim.batch_ramp:Ramp",
    "ramp_of": "gracetune.optim.batch_ramp:ramp_of",
    "StepBatch": "gracetune.optim.batch_ramp:StepBatch",
    "KeepsRates": "gracetune.optim.element_rates:KeepsRates",
    "RateGrid": "gracetune.optim.element_rates:RateGrid",
    "RateLimits": "gracetune.optim.element_rates:RateLimits",
    "class_of": "gracetune.optim.record:class_of",
    "OptimizerRecord": "gracetune.optim.record:OptimizerRecord",
    "ParamGroup": "gracetune.optim.record:ParamGroup",
    "per_element": "gracetune.optim.record:per_element",
    "StateSize": "gracetune.optim.record:StateSize",
    "TrainedTensors": "gracetune.optim.record:TrainedTensors",
    # checkpoints
    "CheckpointPart": "gracetune.checkpoint.state_parts:CheckpointPart",
    "SavedPart": "gracetune.checkpoint.state_parts:SavedState",
    # events
    "Event": "gracetune.telemetry.events:Event",
    "Record": "gracetune.telemetry.events:Record",
    "StepDone": "gracetune.telemetry.events:StepDone",
    "Sink": "gracetune.telemetry.dispatcher:Sink",
    "TrackedRun": "gracetune.telemetry.dispatcher:TrackedRun",
    "Tracker": "gracetune.telemetry.dispatcher:Tracker",
    # runs
    "RunOptions": "gracetune.train.run:RunOptions",
    "train": "gracetune.train.run:train",
    "View": "gracetune.train.view:View",
}
"""Name -> module and attribute that define it. The imports above repeat it for type checkers; a test compares both."""

_FORMER: Final[Mapping[str, str]] = {
    "Augmentation": "AppliedAugmentation",
    "CachePlace": "CacheResources",
    "CutTexts": "TruncatedTexts",
    "PictureCodec": "ImageCodec",
    "PictureLatents": "ImageLatents",
    "Placement": "PartPlacement",
    "RampWindow": "StepBatch",
    "RefusedFlavour": "RejectedFlavour",
    "Stage": "ExpertStage",
    "refuse_references": "reject_references",
}
"""Old name -> new name. The old names work for one release."""


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        message = f"gracetune.extension.{name} is now called {_FORMER[name]}; the old name works in this release only"
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return __getattr__(_FORMER[name])
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, _, original = _HOMES[name].partition(":")
    value = getattr(importlib.import_module(module), original)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_HOMES]
