/** The order of rows in an epoch: the function `permutation` of Python's onnxfit. */

const GOLDEN = 0x9e3779b9; // 2^32 divided by the golden ratio

/**
 * Return the order of rows in an epoch: the rows sorted by a hash of 32 bits ("lowbias32").
 *
 * @param seed A whole number, taken modulo 2^64.
 * @param epoch The number of the epoch, from 0.
 */
export function permutation(seed: number, epoch: number, rows: number): Uint32Array {
  const block = 0; // Python shuffles parts of large files by themselves
  const words = [seed, epoch, block].flatMap(wordsOf);
  const [first, second] = [keyOf(0, words), keyOf(1, words)];
  const hashes = new Uint32Array(rows);
  for (let row = 0; row < rows; row += 1) hashes[row] = mixed(mixed(row + first) + second);
  // no two rows share a hash
  return new Uint32Array(rows).map((_, row) => row).sort((a, b) => hashes[a]! - hashes[b]!);
}

/** The lower and the upper 32 bits of a whole number. */
function wordsOf(value: number): number[] {
  const bits = BigInt.asUintN(64, BigInt(value));
  return [Number(bits & 0xffffffffn), Number(bits >> 32n)];
}

function keyOf(start: number, words: readonly number[]): number {
  return words.reduce((key, word) => mixed(key + word + GOLDEN), start);
}

/** The hash lowbias32 of C. Wellons (hash-prospector, 2018). */
function mixed(value: number): number {
  let bits = value >>> 0;
  bits = Math.imul(bits ^ (bits >>> 16), 0x7feb352d);
  bits = Math.imul(bits ^ (bits >>> 15), 0x846ca68b);
  return (bits ^ (bits >>> 16)) >>> 0;
}
