// A field to draw a digit on, and the drawing as the pixels that the classifier was trained with.

const SIZE = 280;
const BITMAP = 32; // The data set counts ink in 4 x 4 fields of a 32 x 32 bitmap, which the digit fills.

export class Drawing {
  #canvas;
  #context;
  #strokes = [];
  #pen = null; // the id of the pointer that draws
  #changed;

  /** @param changed what is called with the pixels, or null where nothing is drawn */
  constructor(canvas, changed) {
    this.#canvas = canvas;
    this.#changed = changed;
    const scale = Math.max(1, devicePixelRatio);
    canvas.width = canvas.height = SIZE * scale;
    this.#context = canvas.getContext("2d");
    this.#context.scale(scale, scale);

    canvas.addEventListener("pointerdown", (event) => {
      if (this.#pen === null && event.button === 0) {
        this.#pen = event.pointerId;
        canvas.setPointerCapture(event.pointerId);
        this.#strokes.push([this.#point(event)]);
        this.#show();
      }
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerId === this.#pen) {
        this.#strokes.at(-1).push(this.#point(event));
        this.#show();
      }
    });
    for (const end of ["pointerup", "pointercancel"]) {
      canvas.addEventListener(end, (event) => {
        if (event.pointerId === this.#pen) {
          this.#pen = null;
          changed(this.pixels());
        }
      });
    }
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#show());
    this.#show();
  }

  clear() {
    this.#strokes = [];
    this.#show();
    this.#changed(null);
  }

  /** Returns 8 x 8 numbers from 0 to 1, or null where nothing is drawn. */
  pixels() {
    if (!this.#strokes.length) {
      return null;
    }
    const points = this.#strokes.flat();
    const [left, top] = [0, 1].map((axis) => Math.min(...points.map((point) => point[axis])));
    const [right, bottom] = [0, 1].map((axis) => Math.max(...points.map((point) => point[axis])));
    const pen = 4;
    const zoom = (BITMAP - pen) / Math.max(right - left, bottom - top, 1);
    const place = ([x, y]) => [
      BITMAP / 2 + (x - (left + right) / 2) * zoom,
      BITMAP / 2 + (y - (top + bottom) / 2) * zoom,
    ];
    const context = new OffscreenCanvas(BITMAP, BITMAP).getContext("2d", { willReadFrequently: true });
    draw(
      context,
      this.#strokes.map((stroke) => stroke.map(place)),
      pen,
    );
    const { data } = context.getImageData(0, 0, BITMAP, BITMAP);
    const pixels = new Float32Array(64);
    for (let index = 0; index < BITMAP * BITMAP; index++) {
      const [row, column] = [Math.floor(index / BITMAP / 4), Math.floor((index % BITMAP) / 4)];
      pixels[8 * row + column] += data[4 * index + 3] / 255 / 16;
    }
    return pixels;
  }

  #point(event) {
    const box = this.#canvas.getBoundingClientRect();
    return [((event.clientX - box.left) / box.width) * SIZE, ((event.clientY - box.top) / box.height) * SIZE];
  }

  #show() {
    this.#context.clearRect(0, 0, SIZE, SIZE);
    this.#context.strokeStyle = getComputedStyle(this.#canvas).color;
    draw(this.#context, this.#strokes, 22);
  }
}

function draw(context, strokes, width) {
  context.lineWidth = width;
  context.lineCap = context.lineJoin = "round";
  for (const stroke of strokes) {
    context.beginPath();
    context.moveTo(...stroke[0]);
    stroke.forEach((point) => context.lineTo(...point));
    context.stroke();
  }
}
