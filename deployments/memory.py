"""What the processes of an application do about their memory."""

import gc


def freeze_loaded() -> None:
    """Take everything that was loaded out of the garbage collector's way; call it once, when a process is ready to serve.

    Modules, models and handlers live as long as the process. Without this every full collection looks at all of them, some
    hundred thousand objects, in the middle of a round (docs/log.md).
    """
    gc.collect()
    gc.freeze()
