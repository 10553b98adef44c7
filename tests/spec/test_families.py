"""No family is missing anywhere: folder, registry, random checkpoints."""

import subprocess
import sys
from pathlib import Path

import moestro.spec.families
from moestro.checkpoint.synth import TINY
from moestro.spec.fields import ModelSpec
from moestro.spec.registry import FAMILIES, read_spec
from tests.spec.real import SIZES


def test_every_family_is_everywhere() -> None:
    folder = Path(moestro.spec.families.__file__).parent
    files = {p.stem for p in folder.glob("*.py")} - {"__init__"}
    assert files == set(FAMILIES) == set(TINY) == {s["family"] for s in SIZES.values()}


def test_names_lead_to_one_family_only() -> None:
    names = [n for f in FAMILIES.values() for n in (*f.architectures, *f.model_types)]
    assert len(names) == len(set(names))


def test_reading_a_config_does_not_wait_for_torch() -> None:
    code = "import sys, moestro.spec.registry, moestro.spec.describe; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_tiny_models_can_run() -> None:
    for family, config in TINY.items():
        spec = read_spec(config)
        assert isinstance(spec, ModelSpec)
        assert (spec.family, spec.blockers) == (family, ())
