/** The loss of each step, and the accuracy on the drawings after each epoch. */

const LEFT = 36;
const RIGHT = 44;
const BOTTOM = 22;
const TOP = 8;
const MAX_POINTS = 400;

export class Chart {
  private losses: number[] = [];
  private accuracies: [step: number, value: number][] = [];
  private isWaiting = false;

  constructor(private readonly canvas: HTMLCanvasElement) {
    new ResizeObserver(() => this.draw()).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  reset(): void {
    this.losses = [];
    this.accuracies = [];
    this.draw();
  }

  addLoss(loss: number): void {
    this.losses.push(loss);
    this.drawSoon();
  }

  /** Add the share of the drawings that are right. */
  addAccuracy(value: number): void {
    this.accuracies.push([this.losses.length, value]);
    this.drawSoon();
  }

  /** Draw once before the next picture of the screen, however many points there are. */
  private drawSoon(): void {
    if (this.isWaiting) return;
    this.isWaiting = true;
    requestAnimationFrame(() => {
      this.isWaiting = false;
      this.draw();
    });
  }

  private draw(): void {
    const { canvas } = this;
    const ratio = devicePixelRatio || 1;
    const [width, height] = [canvas.clientWidth, canvas.clientHeight];
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    const context = canvas.getContext("2d")!;
    const color = (name: string) => getComputedStyle(canvas).getPropertyValue(name);
    context.scale(ratio, ratio);
    context.font = `12px ${getComputedStyle(canvas).fontFamily}`;
    const most = Math.max(1, ...this.losses);
    const steps = Math.max(this.losses.length, 20);
    const x = (step: number) => LEFT + ((width - LEFT - RIGHT) * step) / steps;
    const y = (share: number) => TOP + (height - TOP - BOTTOM) * (1 - share);

    context.strokeStyle = color("--line");
    context.fillStyle = color("--faint");
    context.textAlign = "right";
    context.textBaseline = "middle";
    for (const share of [0, 0.5, 1]) {
      context.beginPath();
      context.moveTo(LEFT, y(share));
      context.lineTo(width - RIGHT, y(share));
      context.stroke();
      context.fillText((share * most).toFixed(1), LEFT - 8, y(share));
    }
    context.textAlign = "left";
    context.fillStyle = color("--good");
    for (const share of [0, 0.5, 1]) {
      context.fillText(`${100 * share} %`, width - RIGHT + 6, y(share));
    }
    context.textBaseline = "alphabetic";
    context.fillStyle = color("--faint");
    context.textAlign = "right";
    context.fillText(`${this.losses.length} steps`, width - RIGHT, height - 4);
    context.textAlign = "left";
    context.fillStyle = color("--accent");
    context.fillText("loss", LEFT, height - 4);
    context.fillStyle = color("--good");
    context.fillText("drawings right", LEFT + 40, height - 4);

    const stride = Math.ceil(this.losses.length / MAX_POINTS);
    const shown = this.losses.map((loss, i) => [i + 1, loss / most] as const);
    line(
      context,
      color("--accent"),
      1.6,
      shown.filter((_, i) => i % stride === 0),
      x,
      y,
    );
    line(context, color("--good"), 2.4, this.accuracies, x, y);
  }
}

function line(
  context: CanvasRenderingContext2D,
  color: string,
  width: number,
  points: readonly (readonly [number, number])[],
  x: (step: number) => number,
  y: (share: number) => number,
): void {
  context.beginPath();
  for (const [step, share] of points) context.lineTo(x(step), y(share));
  context.strokeStyle = color;
  context.lineWidth = width;
  context.lineJoin = "round";
  context.stroke();
  context.lineWidth = 1;
}
