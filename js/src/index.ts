export { Callback, type CallbackLike, type FitParams, type Logs } from "./callbacks.js";
export type { ArrayData, ArrayWithDims, Data, NestedArray } from "./data.js";
export { EarlyStopping, type EarlyStoppingOptions, TerminateOnNaN } from "./early_stopping.js";
export {
  CheckpointError,
  DataError,
  DivergenceError,
  InstallationError,
  ModelError,
  OnnxfitError,
  SettingError,
  StepError,
} from "./errors.js";
export type { FileReader, FolderSource } from "./folder.js";
export type { History } from "./loop.js";
export type { Device, Runtime, RuntimeOptions } from "./runtime.js";
export { readSafetensors, type SafetensorsFile, writeSafetensors } from "./safetensors.js";
export type { NumberArray, TensorType, TypedTensor } from "./tensors.js";
export type { Figures } from "./tracker.js";
export {
  type EvaluateOptions,
  type FitOptions,
  type LoadOptions,
  type Prediction,
  type PredictOptions,
  Trainer,
} from "./trainer.js";
