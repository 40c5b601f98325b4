"""Let each call for a file fail in turn, or kill the process there: `make faults`.

    python scripts/faults [--processes N] [--sample] [word ...]

The modules: `calls` replaces Python's functions for files by functions that fail at one call,
`savers` lists the functions that write files, `points` checks the laws for each of their calls,
`training` does so for a fit with callbacks, and `__main__` shares the work between processes.

The laws: the old or the new files can be read afterwards, never a mixture; the trainer is as it was
before; the next call writes the new files and leaves no others; and a training that is run again
ends as the uninterrupted one, bit for bit.
"""
