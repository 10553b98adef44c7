"""Templates in their own process: they cannot stop, fill or outlive the server."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from moestro.errors import RequestError
from moestro.text.render import TemplateRenderer

TEMPLATE = """{% for m in messages %}{{ m.role }}={{ m.content }};{% endfor %}
{%- if messages[0].content == "loop" %}
{%- for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}
{%- if messages[0].content == "big" %}{{ ("x" * 3000000000) | length }}{% endif %}
{%- if messages[0].content == "power" %}{{ (messages | length + 8) ** (9 ** 9) }}{% endif %}
{%- if messages[0].content == "refuse" %}{{ raise_exception("no") }}{% endif %}
{%- if messages[0].content == "kwargs" %}{{ extra }}{% endif %}"""


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TemplateRenderer]:
    folder = tmp_path_factory.mktemp("template")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    renderer = TemplateRenderer(folder, time_limit_s=0.5)
    renderer.start()
    yield renderer
    renderer.close()


def render(renderer: TemplateRenderer, content: str, **kwargs: object) -> str:
    return asyncio.run(renderer.render([{"role": "user", "content": content}], True, kwargs))


def test_it_renders(renderer: TemplateRenderer) -> None:
    assert render(renderer, "hé") == "user=hé;"
    assert render(renderer, "kwargs", extra="e") == "user=kwargs;e"


@pytest.mark.parametrize("content", ["loop", "big", "power"])
def test_a_template_that_runs_away_is_ended(renderer: TemplateRenderer, content: str) -> None:
    started = time.monotonic()
    with pytest.raises(RequestError, match=r"takes more than|fails on these messages") as caught:
        render(renderer, content)
    assert caught.value.field == "messages"
    assert time.monotonic() - started < 20
    assert render(renderer, "next") == "user=next;"


def test_errors_keep_their_field(renderer: TemplateRenderer) -> None:
    with pytest.raises(RequestError, match="refuses these messages: no"):
        render(renderer, "refuse")
    with pytest.raises(RequestError) as caught:
        render(renderer, "a", messages=[])
    assert caught.value.field == "chat_template_kwargs"


def test_the_loop_goes_on_meanwhile(renderer: TemplateRenderer) -> None:
    async def both() -> int:
        ticks = 0
        slow = asyncio.create_task(renderer.render([{"role": "user", "content": "loop"}], True, {}))
        while not slow.done():
            await asyncio.sleep(0.01)
            ticks += 1
        with pytest.raises(RequestError):
            await slow
        return ticks

    assert asyncio.run(both()) > 10


def test_a_killed_process_is_replaced(renderer: TemplateRenderer) -> None:
    render(renderer, "a")
    assert renderer._process is not None
    os.kill(renderer._process.pid or 0, 9)
    assert render(renderer, "b") == "user=b;"


def test_close_ends_it(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    renderer = TemplateRenderer(tmp_path)
    renderer.start()
    assert renderer._process is not None
    pid = renderer._process.pid
    renderer.close()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(RequestError, match="stopping"):
        render(renderer, "a")


def test_close_does_not_wait_for_a_template_that_loops(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    renderer = TemplateRenderer(tmp_path, time_limit_s=20)
    renderer.start()

    async def close_meanwhile() -> float:
        slow = asyncio.create_task(renderer.render([{"role": "user", "content": "loop"}], True, {}))
        await asyncio.sleep(0.5)
        started = time.monotonic()
        renderer.close()
        with pytest.raises(RequestError):
            await slow
        return time.monotonic() - started

    assert asyncio.run(close_meanwhile()) < 10
