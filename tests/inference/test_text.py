"""Text as it comes: stop strings and characters spread over tokens (R40, R46)."""

import pytest

from hrmlm.inference import GenerationOptions, generate, stream
from hrmlm.models import LanguageModel
from tests.inference.helpers import ANY, BYTES, END, each_family, greedy, say, small_model


@pytest.fixture(scope="module")
def model() -> LanguageModel:
    return small_model(ANY)


def _pieces(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, ids: list[int], **options: object) -> list[str]:
    """What a stream shows when the model says `ids`; the same text as the completion has."""
    settings = GenerationOptions.parse({"max_new_tokens": len(ids), **options}, "test")
    say(monkeypatch, ids)
    events = list(stream(model, BYTES, "p", settings))
    completion = generate(model, BYTES, "p", settings)[0]
    pieces = [event.text for event in events]
    assert "".join(pieces) == completion.text
    assert [event.id for event in events] == completion.ids
    assert [event.logprob for event in events] == completion.logprobs
    assert [event.finish_reason for event in events if event.finish_reason] == [completion.finish_reason]
    assert events[-1].finish_reason == completion.finish_reason
    return pieces


@each_family
@pytest.mark.parametrize("cache", [True, False])
def test_stop_string_over_several_tokens(family: str, cache: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model(family)
    say(monkeypatch, BYTES.encode("one STOP two"), BYTES.encode("one STAY two"))
    options = greedy(12, stop="STOP", cache=cache)
    stopped, unstopped = generate(model, BYTES, ["a", "b"], options)
    assert (stopped.text, stopped.finish_reason) == ("one ", "stop")
    assert stopped.ids == BYTES.encode("one STOP")
    assert len(stopped.logprobs) == len(stopped.ids)
    assert (unstopped.text, unstopped.finish_reason) == ("one STAY two", "length")


def test_stop_string_is_never_shown(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = _pieces(model, monkeypatch, BYTES.encode("ab##c###d"), stop=["###"])
    assert pieces == ["a", "b", "", "", "##c", "", "", ""]


def test_what_only_looked_like_a_stop_string_is_shown(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _pieces(model, monkeypatch, BYTES.encode("ab##"), stop=["###"]) == ["a", "b", "", "##"]
    assert _pieces(model, monkeypatch, [*BYTES.encode("ab##"), END], stop=["###"]) == ["a", "b", "", "", "##"]


def test_stop_string_of_many_bytes(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "".join(_pieces(model, monkeypatch, BYTES.encode("naïve 🛑 tail"), stop="🛑")) == "naïve "


def test_stop_strings_of_the_prompt_do_not_count(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    say(monkeypatch, BYTES.encode("#x"))
    assert generate(model, BYTES, "a##", greedy(2, stop="###"))[0].text == "#x"


@pytest.mark.parametrize("text", ["😀", "👨‍👩‍👧‍👦!", "漢字かな", "e\u0301a\u0300 z", "mixed é 😀 漢"])
def test_characters_are_shown_whole(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    pieces = _pieces(model, monkeypatch, BYTES.encode(text))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    assert sum(map(bool, pieces)) == len(text), "every character comes with its last byte"


@pytest.mark.parametrize("n_bytes", [1, 2, 3, 4])
def test_a_limit_within_a_character(model: LanguageModel, monkeypatch: pytest.MonkeyPatch, n_bytes: int) -> None:
    ids = BYTES.encode("a😀")[: 1 + n_bytes]
    pieces = _pieces(model, monkeypatch, ids)
    assert "".join(pieces) == BYTES.decode(ids) == ("a😀" if n_bytes == 4 else "a\ufffd")


def test_an_invalid_byte_does_not_hold_the_stream_back(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = [*BYTES.encode("a"), 0xFF, *BYTES.encode("b"), 0xE6, *BYTES.encode("cd")]
    pieces = _pieces(model, monkeypatch, ids)
    assert "".join(pieces) == "a\ufffdb\ufffdcd"
    assert pieces[-1] == "d"
