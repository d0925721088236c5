"""`app`: a page on this machine to try texvlm in the browser."""

import argparse
import importlib.util
import os
import socket
import tempfile
import threading
import warnings
from pathlib import Path
from typing import Any

from texvlm.cli import SELECT_PATHS, Complaint
from texvlm.cli.photo import EXAMPLES, shipped

CELLS, LARGEST_BUDGET, CENTRE = (8, 16, 32, 64), 1024, (0.5, 0.5)
PICTURE_HEIGHT = 560  # pixels of what is shown large
FONTS = ("system-ui", "sans-serif")  # none that is fetched
STYLE = f"""
.gradio-container {{ max-width: 1560px !important; margin: 0 auto !important; }}
#head h1 {{ margin: 0; font-size: 1.7rem; }}
#head p {{ margin: 0; opacity: .65; }}
#said {{ min-height: 1.7rem; }}
.view img {{ max-height: {PICTURE_HEIGHT}px; }}
footer {{ display: none !important; }}
"""
DARK = "() => document.body.classList.add('dark')"  # as the drawings are
HEAD = "# texvlm\nWhat a vision-language model sees of a picture under a budget of cells. Nothing leaves this machine."
WELCOME = "Drop a picture, paste one, take one, or click an example."
QUERIES = "The digits 0 to 9, by what ships. Other words: pip install 'texvlm[clip]', and texvlm.ClipEmbedding from Python."


def page(max_size: int) -> Any:
    """The page, a `gradio.Blocks`; pictures are shrunk to a longer side of `max_size` pixels."""
    import gradio as gr

    from texvlm.cli import explore
    from texvlm.cli.explore import Ask, Shown

    def view(label: str, **how: Any) -> Any:
        return gr.Image(label=label, format="png", interactive=False, buttons=["fullscreen"], elem_classes="view", **how)

    films = tempfile.TemporaryDirectory(prefix="texvlm-")  # that were made; gone with the page
    with gr.Blocks(title="texvlm", analytics_enabled=False, fill_width=True) as blocks:
        gr.Markdown(HEAD, elem_id="head")
        shown, gaze, tab = gr.State(), gr.State(CENTRE), gr.State("kept")
        with gr.Tab("Picture"), gr.Row():
            with gr.Column(scale=1, min_width=372):
                source = gr.Image(label="Picture", sources=["upload", "clipboard", "webcam"], height=190, elem_id="source")
                source.preprocess = lambda file: None if file is None else file.path  # read by texvlm, whatever is in it
                if examples := shipped(EXAMPLES):
                    gr.Examples([[str(path)] for path in examples], source, label="Examples", examples_per_page=len(examples))
                budget = gr.Slider(1, LARGEST_BUDGET, 273, step=1, label="Budget, in cells", elem_id="budget")
                paths = [("automatic", "auto"), *((path, path) for path in SELECT_PATHS)]
                with gr.Row():
                    path = gr.Dropdown(paths, value="auto", label="Path", min_width=130, elem_id="path")
                    none = ("none", "")
                    other = gr.Dropdown([none, *paths[1:]], value="", label="Compare with", min_width=130, elem_id="other")
                cell = gr.Radio(CELLS, value=16, label="Cell, in pixels")
                query = gr.Textbox(label="Text to look for", info=QUERIES, placeholder="seven", submit_btn=True, elem_id="query")
            with gr.Column(scale=3):
                said = gr.Markdown(WELCOME, elem_id="said")
                with gr.Tabs():
                    tabs = {}
                    with gr.Tab("Kept cells") as tabs["kept"]:
                        with gr.Row():
                            first = view("What is kept", elem_id="kept")
                            second = view("What the other keeps", visible=False, elem_id="second")
                        difference = view("Where they differ", visible=False, elem_id="difference")
                    with gr.Tab("What a model sees") as tabs["seen"]:
                        sees = gr.Radio(explore.SIGHTS, value="cells", show_label=False, container=False, elem_id="sees")
                        wipe = gr.ImageSlider(
                            label="The original, wiped away to what a model sees",
                            type="numpy",
                            format="png",
                            interactive=False,
                            max_height=PICTURE_HEIGHT,
                            elem_id="wipe",
                        )
                    with gr.Tab("Channels") as tabs["channels"]:
                        channels = gr.Image(show_label=False, format="png", interactive=False, buttons=["fullscreen"])
                    with gr.Tab("Pyramid") as tabs["pyramid"]:
                        levels = gr.Image(show_label=False, format="png", interactive=False, buttons=["fullscreen"])
                    with gr.Tab("Homunculus") as tabs["homunculus"], gr.Row():
                        fixated = view("Click where to look", elem_id="fixated")
                        warped = view("As large as it is sharp", elem_id="warped")
        with gr.Tab("Video"), gr.Row():
            with gr.Column(scale=1, min_width=372):
                film = gr.Video(label="Film", sources=["upload"], height=240, elem_id="film")
                gr.Markdown(
                    f"The first {explore.FRAMES} frames, at most {explore.LONGEST_SIDE} pixels wide or high; budget, cell, path and "
                    "text are those of the picture."
                )
                follow = gr.Button("Follow it", variant="primary", elem_id="follow")
            with gr.Column(scale=3):
                film_said = gr.Markdown("What is kept of each frame, as a film, and what each stage cost.", elem_id="film-said")
                reel = gr.Video(label="Kept cells over time", interactive=False, autoplay=True, height=560, elem_id="reel")

        def asked(budget: int, path: str, other: str, cell: int, query: str, gaze: tuple[float, float]) -> Ask:
            return Ask(int(budget), int(cell), None if path == "auto" else path, other or None, query or None, gaze)

        def load(name: str | None) -> tuple[Shown | None, tuple[float, float], str]:
            if name is None:
                return None, CENTRE, WELCOME
            try:
                found, words = explore.opened(name, max_size)
            except Complaint as complaint:
                return None, CENTRE, f"⚠ {complaint}"
            return found, CENTRE, words

        def render(shown: Shown | None, tab: str, sees: str, *settings: Any) -> dict[Any, Any]:
            if shown is None:
                return dict.fromkeys((first, second, difference, wipe, channels, levels, fixated, warped))
            ask = asked(*settings)
            try:
                return draw(shown, tab, sees, ask)
            except Complaint as complaint:
                return {said: f"⚠ {complaint}"}

        def draw(shown: Shown, tab: str, sees: str, ask: Ask) -> dict[Any, Any]:
            if tab == "channels":
                image, words = explore.channel_sheet(shown, ask)
                return {channels: image, said: words}
            if tab == "pyramid":
                image, words = explore.pyramid(shown)
                return {levels: image, said: words}
            if tab == "homunculus":
                image, magnified, words = explore.magnified(shown, ask)
                return {fixated: image, warped: magnified, said: words}
            found = explore.chosen(shown, ask)
            words = " · ".join(choice.words for choice in found)
            if tab == "seen":
                image, sharp = explore.sight(shown, found, ask, sees)
                return {wipe: (explore.bytes_of(shown.pixels), image), said: f"{words} · {sharp}" if sees == "cells" else sharp}
            images, what = explore.kept(shown, found)
            both = len(images) > 1
            return {
                first: gr.update(value=images[0], label=f"What {found[0].path} keeps"),
                second: gr.update(value=images[1], label=f"What {found[1].path} keeps", visible=True)
                if both
                else gr.update(visible=False),
                difference: gr.update(value=images[2] if both else None, visible=both),
                said: f"{words} · {what}",
            }

        def look_at(shown: Shown | None, event: gr.SelectData) -> tuple[float, float]:
            if shown is None:
                return CENTRE
            x, y = event.index
            return x / shown.picture.width, y / shown.picture.height

        def look_at_source(shown: Shown | None, event: gr.SelectData) -> tuple[float, float]:
            if shown is None:
                return CENTRE
            height, width = shown.picture.full
            return event.index[0] / width, event.index[1] / height

        def follow_it(name: str | None, *settings: Any) -> tuple[str | None, str]:
            if name is None:
                return None, "⚠ there is no film yet: drop one"
            target = Path(tempfile.mkdtemp(dir=films.name)) / "kept.mp4"
            try:
                rows = explore.film(name, target, asked(*settings))
            except Complaint as complaint:
                return None, f"⚠ {complaint}"
            return str(target), " · ".join(f"**{stage}** {mean} ms" for stage, mean, *_ in rows) + " a frame"

        settings = [budget, path, other, cell, query, gaze]
        drawn = [first, second, difference, wipe, channels, levels, fixated, warped, said]
        quiet: dict[str, Any] = {"show_progress": "hidden", "trigger_mode": "always_last"}
        source.change(load, source, [shown, gaze, said], show_progress="hidden").then(
            render, [shown, tab, sees, *settings], drawn, show_progress="minimal"
        )
        changes = [part.change for part in (budget, path, other, cell, sees, tab, gaze)]
        gr.on([*changes, query.submit], render, [shown, tab, sees, *settings], drawn, **quiet)
        for name, part in tabs.items():
            part.select(lambda name=name: name, None, tab, show_progress="hidden")
        fixated.select(look_at, shown, gaze, show_progress="hidden")
        source.select(look_at_source, shown, gaze, show_progress="hidden")
        follow.click(follow_it, [film, *settings], [reel, film_said])
    return blocks


def launched(blocks: Any, host: str, port: int, browser: bool) -> str:
    """Serves a page in threads of its own, and returns its address."""
    import gradio as gr

    theme = gr.themes.Base(primary_hue="orange", neutral_hue="slate", font=FONTS, font_mono=("ui-monospace", "monospace"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, address, _ = blocks.launch(
            server_name=host,
            server_port=port,
            inbrowser=browser,
            prevent_thread_lock=True,
            quiet=True,
            share=False,
            ssr_mode=False,
            pwa=False,
            footer_links=[],
            theme=theme,
            css=STYLE,
            js=DARK,
            allowed_paths=[str(path.parent) for path in shipped(EXAMPLES[:1])],
        )
    return str(address)


def free(host: str, port: int) -> None:
    """Complains where nothing can listen there."""
    try:
        family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        raise Complaint(
            f"cannot listen on {host}, port {port}: {(error.strerror or str(error)).lower()}; see --port and --host"
        ) from None


def run(args: argparse.Namespace) -> int:
    """The command."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # before Gradio is imported
    if importlib.util.find_spec("gradio") is None:
        raise Complaint("the page needs Gradio: pip install 'texvlm[app]'")
    free(args.host, args.port)
    blocks = page(args.max_size)
    print(f"texvlm is at {launched(blocks, args.host, args.port, not args.no_browser)} (ctrl-C ends it)", flush=True)
    try:
        threading.Event().wait()
    finally:
        blocks.close(verbose=False)
    return 0
