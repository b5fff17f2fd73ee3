"""Progress bars: text on a terminal, a widget in a notebook that has them."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a notebook without ipywidgets has bars of text
    from tqdm.autonotebook import tqdm as tqdm  # as tqdm.auto, which imports asyncio as well
