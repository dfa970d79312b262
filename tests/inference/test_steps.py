"""Learned depth in generation: every token knows its steps, and can show them (R33, R35, R41)."""

import io
import re

import pytest
import torch
from rich.console import Console

from hrmlm.data.tokenizer import Tokenizer
from hrmlm.errors import UserError
from hrmlm.inference import Engine, GenerationOptions, TokenEvent, generate, stream
from hrmlm.inference.decoding import Cached
from hrmlm.inference.show import COLOURS, DepthWriter, style, visible
from hrmlm.models import LanguageModel, build_model
from tests.families import FAMILIES
from tests.inference.helpers import BYTES, END, greedy, say, small_model

ADAPTIVE = [name for name, settings in FAMILIES.items() if build_model(settings).learns_depth]
adaptive = pytest.mark.parametrize("family", ADAPTIVE)
PROMPTS = ["x", "hello", "twenty bytes of text"]


def steps_of_full_forward(model: LanguageModel, prompt_ids: list[int], ids: list[int]) -> list[int]:
    """Steps of the positions that the ids were read from, from one forward pass over everything."""
    with torch.no_grad():
        steps_L = model(torch.tensor([prompt_ids + ids[:-1]])).steps_BL[0]
    return steps_L[len(prompt_ids) - 1 :].tolist()


@adaptive
@pytest.mark.parametrize("cache", [True, False])
def test_steps_are_those_of_the_full_forward_alone_and_in_a_batch(family: str, cache: bool) -> None:
    model = small_model(family)
    together = generate(model, BYTES, PROMPTS, greedy(8, cache=cache))
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = [event.steps for event in stream(model, BYTES, prompt, greedy(8, cache=cache))]
        assert row.steps == alone == steps_of_full_forward(model, row.prompt_ids, row.ids)
    assert len({step for row in together for step in row.steps or []}) > 1, "depth must vary to prove something"


@adaptive
def test_stopped_tokens_are_not_computed_again(family: str) -> None:
    model = small_model(family)
    engine = Engine(model, BYTES, ["x"], greedy(20, halt_threshold=0.6))
    engine.step()  # the prompt
    calls = []
    core = next(item.module for item in model.schedule() if item.name.startswith("step"))
    model.get_submodule(core).register_forward_hook(lambda module, args, output: calls.append(len(args[0])))
    events = list(engine.run())
    per_step = sum(item.module == core for item in model.schedule(1))
    assert len(calls) == per_step * sum(event.steps or 0 for event in events)
    assert len(calls) < per_step * model.trained_depth * len(events)


@adaptive
@pytest.mark.parametrize("cache", [True, False])
def test_depth_and_threshold_are_obeyed(family: str, cache: bool) -> None:
    model = small_model(family)
    for depth in (1, 3):
        row = generate(model, BYTES, "hello", greedy(8, cache=cache, depth=depth))[0]
        assert row.steps == [depth] * 8
        with torch.no_grad():
            logits_V = model(torch.tensor([row.prompt_ids + row.ids[:-1]]), depth=depth).logits[0, -1]
        assert row.ids[-1] == int(logits_V.argmax())
    early, late = (
        generate(model, BYTES, "hello", greedy(8, cache=cache, halt_threshold=x))[0].steps for x in (0.2, 1.0)
    )
    assert sum(early) < sum(late)


def test_depth_of_other_families() -> None:
    model = small_model("hrm_lm")
    deep, trained = (generate(model, BYTES, "hello", greedy(8, depth=depth))[0] for depth in (4, None))
    assert (deep.steps, trained.steps) == ([4] * 8, [2] * 8)
    with torch.no_grad():
        logits_V = model(torch.tensor([deep.prompt_ids + deep.ids[:-1]]), depth=4).logits[0, -1]
    assert deep.logprobs[-1] == pytest.approx(float(logits_V.log_softmax(-1).max()), abs=1e-4)
    assert deep.logprobs != trained.logprobs


@pytest.mark.parametrize("settings", [{"depth": 0}, {"depth": 2, "halt_threshold": 0.5}, {"halt_threshold": 1.5}])
def test_impossible_settings_are_refused_at_once(settings: dict) -> None:
    with pytest.raises(UserError):
        stream(small_model("cosmicfish"), BYTES, "x", greedy(5, **settings))


def test_options_of_a_batch_agree() -> None:
    model = small_model("cosmicfish")
    for settings in ({"depth": 1}, {"halt_threshold": 0.5}):
        with pytest.raises(UserError, match=f"{next(iter(settings))} must be the same for all prompts"):
            generate(model, BYTES, ["a", "b"], [greedy(2), greedy(2, **settings)])
    with pytest.raises(UserError, match="does not learn"):
        generate(small_model("hrm_lm"), BYTES, "a", greedy(2, halt_threshold=0.5))


def test_a_model_that_cannot_be_cached_says_so() -> None:
    model = small_model("cosmicfish", halting="sequence")
    with pytest.raises(UserError, match="--no-cache"):
        generate(model, BYTES, "a", greedy(2))
    row = generate(model, BYTES, "a", greedy(4, cache=False))[0]
    assert len(row.ids) == len(row.steps) == 4


def test_steps_leave_no_gradient() -> None:
    """O6: nothing in a generated step needs a gradient."""
    engine = Engine(small_model("cosmicfish"), BYTES, ["x"], greedy(5))
    with torch.enable_grad():
        engine.step()
    assert isinstance(engine._decoder, Cached)
    assert not engine._decoder.cache.keys[-1].requires_grad


# Who owns the text


def pieces_of(events: list[TokenEvent]) -> list[tuple[str, int]]:
    assert all("".join(text for text, _ in event.pieces) == event.text for event in events)
    return [piece for event in events for piece in event.pieces]


def said(monkeypatch: pytest.MonkeyPatch, text: str | bytes, **options: object) -> list[TokenEvent]:
    ids = BYTES.encode(text)
    say(monkeypatch, [*ids, END])
    return list(stream(small_model("cosmicfish"), BYTES, "x", GenerationOptions(max_new_tokens=60, **options)))


def test_characters_belong_to_the_token_that_completed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pieces_of(said(monkeypatch, "aé言b")) == [("a", 0), ("é", 2), ("言", 5), ("b", 6)]


def test_a_cut_character_belongs_to_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    events = said(monkeypatch, b"a\xe8\xa8")
    assert pieces_of(events)[0] == ("a", 0)
    assert pieces_of(events)[-1][1] == len(events) - 1
    assert "".join(event.text for event in events) == "a�"


def test_text_held_back_for_a_stop_string_keeps_its_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = pieces_of(said(monkeypatch, "ab<en and more<end>lost", stop="<end>"))
    assert pieces == [(letter, place) for place, letter in enumerate("ab<en and more")]


def test_tokens_of_several_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = Tokenizer.train(["the cat sat on the mat, the rat sat on the cat. " * 20], 300)
    ids = tokenizer.encode("the cat sat on")
    say(monkeypatch, ids)
    model = small_model("cosmicfish", vocab_size=tokenizer.vocab_size)
    options = GenerationOptions(max_new_tokens=len(ids), stop="on and")
    events = list(stream(model, tokenizer, "x", options))
    assert pieces_of(events) == [(tokenizer.decode([token]), place) for place, token in enumerate(ids)]


# What is shown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def written(events: list[TokenEvent], **console: object) -> str:
    file = io.StringIO()
    writer = DepthWriter(Console(file=file, **console), most=4)
    writer.plain("prompt")
    for event in events:
        writer.write(event)
    writer.finish()
    return file.getvalue()


TERMINAL = {"force_terminal": True, "color_system": "256", "width": 10, "_environ": {}}


def event(text: str, steps: int, token: int) -> TokenEvent:
    return TokenEvent(0, 0, 0.0, text, None, steps, pieces=((text, token),) if text else ())


def test_colours_tell_the_steps_and_change_no_character() -> None:
    text = "a line longer than the terminal\tis wide\r\n [bold]ü 言 \n"
    events = [event(text, 1, 0), event("", 2, 1), event("b", 4, 2)]
    shown = written(events, **TERMINAL)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == f"prompt{visible(text)}b\nsteps: 1 2 3 4 (mean 2.33 over 3 tokens)\n"
    codes = re.findall(r"\x1b\[([0-9;]+)m(b|[1-4])\x1b", shown)
    assert len({code for code, _ in codes}) == 4
    by_character = {character: code for code, character in codes}
    assert by_character["b"] == by_character["4"]


@pytest.mark.parametrize("console", [{}, {**TERMINAL, "no_color": True}, {**TERMINAL, "color_system": None}])
def test_without_colours_a_line_tells_the_steps(console: dict) -> None:
    shown = written([event("hel", 1, 0), event("", 3, 1), event("lo\n", 2, 2)], **console)
    assert shown == "prompthello\n\nsteps: 1 3 2 (mean 2.00 over 3 tokens)\n"


def test_nothing_generated() -> None:
    assert written([], **TERMINAL) == "prompt\n"


@pytest.mark.parametrize("most", [1, 2, 6, 16, 100])
def test_colours_go_from_few_to_many(most: int) -> None:
    places = [COLOURS.index(style(steps, most)) for steps in range(most + 3)]
    assert places == sorted(places)
    assert places[1] == 0
    assert most == 1 or places[most] == len(COLOURS) - 1
