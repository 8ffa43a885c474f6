"""The reference of public names is what the docstrings say now."""

import sys
from pathlib import Path

import megabatch as mb

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import api


def test_the_page_is_what_the_docstrings_say():
    assert api.PAGE.read_text() == api.page(), "python scripts/api.py makes it anew"


def test_every_public_name_has_its_place():
    named = [name for names in api.SECTIONS.values() for name in names]
    assert sorted(named) == sorted(set(mb.__all__) - {"__version__"})


def test_every_entry_says_something():
    for name in set(mb.__all__) - {"__version__"}:
        assert len(api.entry(name).split()) > 10, name
