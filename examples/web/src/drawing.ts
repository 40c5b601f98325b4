/** Strokes of a pen, and the 8 × 8 pixels that the network sees of them. */

export type Point = readonly [x: number, y: number];
export type Stroke = Point[];

export const SIDE = 8; // pixels of an image in each direction
const CANVAS = 64; // pixels of the canvas that is averaged to an image
const MARGIN = 4;
const PEN = 6.5; // as wide as the pens of the data set

/** A small change of a drawing, to train on more than was drawn. */
export interface Change {
  angle: number;
  width: number;
  height: number;
  slant: number;
  shift: Point;
  pen: number;
}

const NO_CHANGE: Change = {
  angle: 0,
  width: 1,
  height: 1,
  slant: 0,
  shift: [0, 0],
  pen: 1,
};

export function randomChange(random: () => number = Math.random): Change {
  const around = (middle: number, by: number) => middle + by * (2 * random() - 1);
  return {
    angle: around(0, 0.16),
    width: around(0.94, 0.1),
    height: around(0.96, 0.08),
    slant: around(0, 0.15),
    shift: [around(0, 3), around(0, 3)],
    pen: around(1, 0.2),
  };
}

/** Draw strokes on a square canvas of `side` pixels; points lie between 0 and 1. */
export function paint(
  context: CanvasRenderingContext2D | OffscreenCanvasRenderingContext2D,
  strokes: readonly Stroke[],
  side: number,
  pen: number,
  color: string,
): void {
  context.strokeStyle = color;
  context.lineWidth = pen;
  context.lineCap = context.lineJoin = "round";
  for (const stroke of strokes) {
    context.beginPath();
    for (const [x, y] of stroke) context.lineTo(x * side, y * side);
    if (stroke.length === 1) context.lineTo(stroke[0]![0] * side + 0.01, stroke[0]![1] * side);
    context.stroke();
  }
}

const canvas = new OffscreenCanvas(CANVAS, CANVAS);
const context = canvas.getContext("2d", { willReadFrequently: true })!;

/**
 * Return the image that the network sees: the drawing in the middle, as high or wide as the image,
 * each pixel the mean of its area, between 0 and 1.
 */
export function toImage(strokes: readonly Stroke[], change: Change = NO_CHANGE): Float32Array {
  context.fillStyle = "#000";
  context.fillRect(0, 0, CANVAS, CANVAS);
  paint(context, placed(strokes, change), CANVAS, PEN * change.pen, "#fff");
  const { data } = context.getImageData(0, 0, CANVAS, CANVAS);
  const image = new Float32Array(SIDE * SIDE);
  const block = CANVAS / SIDE;
  for (let y = 0; y < CANVAS; y += 1) {
    for (let x = 0; x < CANVAS; x += 1) {
      const pixel = Math.floor(y / block) * SIDE + Math.floor(x / block);
      image[pixel]! += data[4 * (y * CANVAS + x)]! / 255 / block ** 2;
    }
  }
  return image;
}

function placed(strokes: readonly Stroke[], change: Change): Stroke[] {
  const points = strokes.flat();
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const [left, top] = [Math.min(...xs), Math.min(...ys)];
  const [wide, high] = [Math.max(...xs) - left, Math.max(...ys) - top];
  const scale = (CANVAS - 2 * MARGIN) / Math.max(wide, high, 0.05);
  const [cos, sin] = [Math.cos(change.angle), Math.sin(change.angle)];
  return strokes.map((stroke) =>
    stroke.map(([x, y]) => {
      const down = (y - top - high / 2) * scale * change.height;
      const across = (x - left - wide / 2) * scale * change.width + change.slant * down;
      return [
        (CANVAS / 2 + cos * across - sin * down + change.shift[0]) / CANVAS,
        (CANVAS / 2 + sin * across + cos * down + change.shift[1]) / CANVAS,
      ] as const;
    }),
  );
}

/** Let a pen draw on a canvas; `changed` is told of each new point, `ended` of the pen's lift. */
export class Pad {
  strokes: Stroke[] = [];
  private pointer: number | null = null;

  constructor(
    private readonly canvas: HTMLCanvasElement,
    private readonly changed: () => void,
  ) {
    canvas.addEventListener("pointerdown", (event) => this.down(event));
    canvas.addEventListener("pointermove", (event) => this.move(event));
    for (const name of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(name, () => {
        this.pointer = null;
      });
    }
  }

  clear(): void {
    this.strokes = [];
    this.redraw();
    this.changed();
  }

  redraw(): void {
    const context = this.canvas.getContext("2d")!;
    const { width } = this.canvas;
    const color = getComputedStyle(this.canvas).getPropertyValue("--ink");
    context.clearRect(0, 0, width, width);
    paint(context, this.strokes, width, width / 14, color);
  }

  private down(event: PointerEvent): void {
    event.preventDefault();
    this.canvas.setPointerCapture(event.pointerId);
    this.pointer = event.pointerId;
    this.strokes.push([]);
    this.move(event);
  }

  private move(event: PointerEvent): void {
    if (event.pointerId !== this.pointer) return;
    const { left, top, width } = this.canvas.getBoundingClientRect();
    for (const one of event.getCoalescedEvents?.() ?? []) this.add(one, left, top, width);
    this.add(event, left, top, width);
    this.redraw();
    this.changed();
  }

  private add(event: PointerEvent, left: number, top: number, width: number): void {
    this.strokes.at(-1)!.push([(event.clientX - left) / width, (event.clientY - top) / width]);
  }
}
