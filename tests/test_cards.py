"""The method cards: one screen, five headings, flags that exist and are accepted, links that lead
somewhere."""

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from megabatch.config import Config
from megabatch.errors import UserError
from megabatch.verbs.parsing import parse
from megabatch.verbs.train import Launch, TrainFlags

DOCS = Path(__file__).parent.parent / "docs"
CARDS = sorted((DOCS / "cards").glob("*.md"))
HEADINGS = ["What it does", "Equation", "Settings", "When it hurts", "Source"]
SCREEN_LINES = 60

by_card = pytest.mark.parametrize("card", CARDS, ids=lambda card: card.stem)


def flags_of(kind, prefix=""):
    """The flags that a dataclass becomes; both of a boolean's."""
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint, name = hints[field.name], field.name.replace("_", "-")
        if dataclasses.is_dataclass(hint):
            yield from flags_of(hint, prefix if kind is TrainFlags else f"{prefix}{name}.")
            continue
        yield f"--{prefix}{name}"
        if hint is bool:
            yield f"--{prefix}no-{name}"


FLAGS = set(flags_of(TrainFlags))


def code_of(text):
    """What stands in backticks, outside blocks of code."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))


def flags_in(text):
    return re.findall(r"(?<![\w-])--[a-z][\w.-]*\w", text)


def anchors_of(path):
    headings = re.findall(r"^#+ (.+)$", path.read_text(), flags=re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_flags_are_the_parser_s():
    assert {"--batch", "--lr.warmup", "--noise.no-follow", "--half-weights", "--resume"} <= FLAGS
    assert not {"--config.batch", "--lr", "--lr-warmup", "--half_weights"} & FLAGS


def test_there_are_cards():
    assert len(CARDS) >= 12


@by_card
def test_five_headings_in_order(card):
    text = card.read_text()
    assert re.findall(r"^## (.+)$", text, flags=re.M) == HEADINGS
    assert re.findall(r"^# .+$", text, flags=re.M) == [text.splitlines()[0]]
    for part in re.split(r"^## .+$", text, flags=re.M)[1:]:
        assert part.strip(), "an empty part"


@by_card
def test_one_screen(card):
    lines = card.read_text().splitlines()
    assert len(lines) <= SCREEN_LINES
    assert max(map(len, lines)) <= 120
    assert card.read_text().isascii()


@by_card
def test_every_flag_exists(card):
    named = flags_in(card.read_text())
    assert named, "a card names the flags that set it"
    assert set(named) <= FLAGS


@by_card
def test_values_given_with_a_flag_are_accepted(card):
    for code in code_of(card.read_text()):
        if code.startswith("--") and " " in code:
            parse(TrainFlags, "train digits", code.split(), TrainFlags(Launch(), Config()))


def test_a_wrong_value_would_be_noticed():
    with pytest.raises(UserError):
        parse(TrainFlags, "train digits", ["--lr.decay", "slow"], TrainFlags(Launch(), Config()))


@pytest.mark.parametrize(
    "page", [DOCS / "README.md", *CARDS], ids=lambda page: f"{page.parent.name}-{page.stem}"
)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if re.match(r"\w+://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.is_file(), target
        assert not anchor or anchor in anchors_of(there), target


def test_the_index_names_every_card():
    linked = re.findall(r"\]\(([^)#]+)", (DOCS / "README.md").read_text())
    assert {f"cards/{card.name}" for card in CARDS} <= set(linked)
