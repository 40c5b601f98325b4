/** Numeric types of tensors, and their typed arrays. */

export type TensorType =
  | "float64"
  | "float32"
  | "float16"
  | "int64"
  | "int32"
  | "int16"
  | "int8"
  | "uint64"
  | "uint32"
  | "uint16"
  | "uint8"
  | "bool";

export type NumberArray =
  | Float64Array
  | Float32Array
  | Int32Array
  | Int16Array
  | Int8Array
  | Uint32Array
  | Uint16Array
  | Uint8Array
  | BigInt64Array
  | BigUint64Array;

/** A tensor on the host. `float16` is kept as the bits of its numbers, in a Uint16Array. */
export interface TypedTensor {
  type: TensorType;
  dims: readonly number[];
  data: NumberArray;
}

/** Type -> its name in a safetensors file. */
export const SAFETENSORS_NAMES: Record<TensorType, string> = {
  float64: "F64",
  float32: "F32",
  float16: "F16",
  int64: "I64",
  int32: "I32",
  int16: "I16",
  int8: "I8",
  uint64: "U64",
  uint32: "U32",
  uint16: "U16",
  uint8: "U8",
  bool: "BOOL",
};

const ARRAYS = {
  float64: Float64Array,
  float32: Float32Array,
  float16: Uint16Array,
  int64: BigInt64Array,
  int32: Int32Array,
  int16: Int16Array,
  int8: Int8Array,
  uint64: BigUint64Array,
  uint32: Uint32Array,
  uint16: Uint16Array,
  uint8: Uint8Array,
  bool: Uint8Array,
} as const;

/** Type -> bytes of one number. */
export const BYTES = Object.fromEntries(
  Object.entries(ARRAYS).map(([type, array]) => [type, array.BYTES_PER_ELEMENT]),
) as Record<TensorType, number>;

/** Return a new array of `length` zeros. */
export function zeros(type: TensorType, length: number): NumberArray {
  return new ARRAYS[type](length);
}

/** Return a new array whose memory holds a copy of `bytes`. */
export function arrayFrom(type: TensorType, bytes: Uint8Array): NumberArray {
  // a Buffer of Node is a Uint8Array whose own `slice` copies nothing
  return new ARRAYS[type](Uint8Array.prototype.slice.call(bytes).buffer);
}

export function sizeOf(dims: readonly number[]): number {
  return dims.reduce((product, size) => product * size, 1);
}
