/** The order of rows in an epoch, as a function of seed, epoch and number of rows. */

type Order = (seed: number, epoch: number, rows: number) => Uint32Array;

// The orders that a manifest may name and this package knows.
const ORDERS: Record<string, Order> = {};

/** Return the order of that name; for an order that is not known here, the package's own. */
export function orderOf(name: string): Order {
  return (Object.hasOwn(ORDERS, name) ? ORDERS[name] : undefined) ?? ownOrder;
}

/** Fisher and Yates' shuffle with numbers of a 32-bit hash of (seed, epoch, position). */
function ownOrder(seed: number, epoch: number, rows: number): Uint32Array {
  const order = Uint32Array.from({ length: rows }, (_, i) => i);
  const key = mixed(mixed(seed >>> 0) ^ epoch);
  for (let i = rows - 1; i > 0; i -= 1) {
    const j = mixed(key ^ i) % (i + 1);
    [order[i], order[j]] = [order[j]!, order[i]!];
  }
  return order;
}

/** The finalizer of MurmurHash3. */
function mixed(value: number): number {
  let hash = value >>> 0;
  hash = Math.imul(hash ^ (hash >>> 16), 0x85ebca6b);
  hash = Math.imul(hash ^ (hash >>> 13), 0xc2b2ae35);
  return (hash ^ (hash >>> 16)) >>> 0;
}
