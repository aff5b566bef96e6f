"""The page at ``/``: a chat in one document, without a build step and without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import re

from dgr.serving.api.prompts import Thinking
from dgr.serving.http.service import Service

__all__ = ["PAGE_HEADERS", "page"]

_TEMPLATE = importlib.resources.files(__package__).joinpath("page.html").read_text("utf-8")

#: ``reasoning_effort`` of each effort of thinking.
_EFFORTS = {Thinking.OFF: "none", Thinking.LOW: "low", Thinking.HIGH: "high", Thinking.MAX: "max"}


def _hash_of(element: str) -> str:
    """What a content security policy calls the one ``<script>`` or ``<style>`` of the page."""
    found = re.search(rf"<{element}>(.*?)</{element}>", _TEMPLATE, re.DOTALL)
    assert found is not None
    return "'sha256-" + base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode() + "'"


#: Nothing but what the page holds runs, nothing is fetched from elsewhere, and nobody may frame it.
PAGE_HEADERS = {
    "content-security-policy": f"default-src 'none'; script-src {_hash_of('script')}; style-src {_hash_of('style')};"
    " connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
}


def page(service: Service) -> str:
    """The page of one server."""
    options, pipeline, slots = service.options, service.engine.pipeline, service.engine.line.slots
    about = (
        f"{slots} conversation{'s' if slots > 1 else ''} of {service.n_ctx} tokens at once, {pipeline.context.numerics.value}"
        f" numerics, stages {', '.join(str(ref.layers) for ref in pipeline.route.stages)}"
    )
    efforts = "".join(
        f'<option value="{value}"{" selected" if effort is options.thinking else ""}>thinking {effort.value}</option>'
        for effort, value in _EFFORTS.items()
    )
    filled = {"@MODEL@": html.escape(options.model), "@ABOUT@": html.escape(about), "@EFFORTS@": efforts}
    return re.sub("|".join(filled), lambda found: filled[found[0]], _TEMPLATE)
