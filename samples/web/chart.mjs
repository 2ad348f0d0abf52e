// Loss and accuracy over the steps, as SVG.

const [WIDTH, HEIGHT] = [640, 330];
const [LEFT, RIGHT, TOP, BOTTOM] = [40, 48, 12, 28];
const POINTS = 320;

export class Chart {
  #svg;

  constructor(svg) {
    this.#svg = svg;
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  }

  /**
   * @param losses the loss of each step
   * @param accuracies { step, accuracy } after each epoch
   */
  show(losses, accuracies) {
    const steps = Math.max(losses.length, 100);
    const highest = Math.max(1, Math.ceil(losses.reduce((most, loss) => Math.max(most, loss), 0)));
    const x = (step) => LEFT + (step / steps) * (WIDTH - LEFT - RIGHT);
    const y = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);
    const quarters = [0, 0.25, 0.5, 0.75, 1];
    const grid = quarters.map((share) =>
      line("grid", [
        [LEFT, y(share)],
        [WIDTH - RIGHT, y(share)],
      ]),
    );
    const scales = quarters.flatMap((share) => [
      text("loss", LEFT - 8, y(share) + 4, "end", Number((share * highest).toFixed(2))),
      text("accuracy", WIDTH - RIGHT + 8, y(share) + 4, "start", `${100 * share}%`),
    ]);
    const marks = [0, 0.5, 1].map((share) =>
      text("steps", x(share * steps), HEIGHT - 8, "middle", Math.round(share * steps)),
    );
    // Where there are more steps than points, a point is the mean of some.
    const width = Math.max(1, Math.ceil(losses.length / POINTS));
    const means = [];
    for (let begin = 0; begin < losses.length; begin += width) {
      const part = losses.slice(begin, begin + width);
      means.push([x(begin + part.length / 2), y(part.reduce((sum, loss) => sum + loss) / part.length / highest)]);
    }
    const reached = accuracies.map(({ step, accuracy }) => [x(step), y(accuracy)]);
    const dots =
      reached.length > 40 ? [] : reached.map(([cx, cy]) => element("circle", { class: "accuracy", cx, cy, r: 3 }));
    this.#svg.replaceChildren(...grid, ...scales, ...marks, line("loss", means), line("accuracy", reached), ...dots);
  }
}

function line(name, points) {
  return element("polyline", {
    class: name,
    points: points.map((point) => point.map((value) => value.toFixed(1))).join(" "),
  });
}

function text(name, x, y, anchor, content) {
  const node = element("text", { class: name, x, y, "text-anchor": anchor });
  node.textContent = content;
  return node;
}

function element(name, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  Object.entries(attributes).forEach(([key, value]) => node.setAttribute(key, value));
  return node;
}
