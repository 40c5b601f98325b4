"""Training folders, for hosts without Python; docs/training-folder.md describes them.

- `step_graphs`: the graphs of a folder, for the host that runs them.
- `inference_operators`: the operators of the graphs for "npu", and their check.
- `manifest`: the names and types of `manifest.json`, and its reader.
- `description`: the contents of the manifest, from a trainer.
- `json_numbers`: floats that JSON lacks.
- `tensors`: the state as a list of tensors, and its file.
- `message`: the places of tensors in the bytes of a model.
- `folder_trainer`: `export_training` and `import_state` of `Trainer`.
- `reading`: the conversion of a folder back to a `Trainer`.
"""
