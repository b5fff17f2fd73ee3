"""Progress bars: text on a terminal, a widget in a notebook that supports it."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # without ipywidgets, a notebook shows bars as text
    from tqdm.autonotebook import tqdm as tqdm  # tqdm.auto would import asyncio as well
