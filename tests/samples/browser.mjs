// Clicks through the page of samples/web in headless Chromium, and prints as JSON what it saw.
//
//   node browser.mjs CHROMIUM SCREENSHOT VALUES
//   node browser.mjs CHROMIUM
//
// CHROMIUM is the browser's path; the screenshot and the trained values (safetensors) are written to the other two.
// Without them the page takes some steps on WebGPU, in software, and so does the step in model/attention.

import { spawn } from "node:child_process";
import { writeFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const SAMPLE = new URL("../../samples/web/", import.meta.url);
const { chromium, devices } = createRequire(SAMPLE)("playwright-core");
const [executablePath, screenshot, values] = process.argv.slice(2);

// How one draws the ten digits, in percents of the field.
const DIGITS = [
  "50 15, 35 25, 30 50, 35 75, 50 85, 65 75, 70 50, 65 25, 50 15",
  "40 30, 50 15, 50 85",
  "30 30, 40 17, 60 17, 68 32, 55 55, 30 83, 72 83",
  "33 20, 50 15, 66 25, 60 42, 47 48, 62 55, 68 70, 52 85, 32 80",
  "45 15, 30 55, 70 55, 58 40, 55 85",
  "68 15, 38 15, 35 45, 55 43, 67 58, 62 78, 45 85, 32 78",
  "58 15, 40 40, 35 65, 45 85, 60 80, 62 62, 50 55, 38 65",
  "30 20, 70 20, 50 50, 40 85",
  "50 50, 36 35, 42 18, 58 18, 64 35, 50 50, 36 65, 42 83, 58 83, 64 65, 50 50",
  "62 30, 50 17, 38 27, 42 45, 60 42, 62 30, 60 60, 52 85",
].map((points) => points.split(", ").map((point) => point.split(" ").map(Number)));

const server = spawn(process.execPath, [fileURLToPath(new URL("server.mjs", SAMPLE))], {
  env: { ...process.env, PORT: "0" },
  stdio: ["ignore", "pipe", "inherit"],
});
const gpu = ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"];
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", ...(screenshot ? [] : gpu)] });
const complaints = [];

async function open(context, address) {
  const page = await context.newPage();
  page.setDefaultTimeout(300_000);
  page.on("console", (message) => ["error", "warning"].includes(message.type()) && complaints.push(message.text()));
  page.on("pageerror", (error) => complaints.push(error.message));
  await page.goto(address);
  await page.locator("#train:enabled").waitFor();
  return page;
}

const text = (page, id) => page.locator(`#${id}`).textContent();

async function trainUntil(page, epoch) {
  await page.click("#train");
  await page.waitForFunction((wanted) => Number(document.getElementById("epoch").textContent) >= wanted, epoch);
  await stop(page);
}

/** Stops training, and waits until all of it is stored: after the step that runs still. */
async function stop(page) {
  await page.click("#train");
  await pause(1000);
  await page.waitForFunction(async () => {
    const { load } = await import("./storage.mjs");
    const points = document.querySelector("#chart polyline.loss").getAttribute("points").split(" ").length;
    return (await load())?.progress.losses.length === points;
  });
}

function pause(milliseconds) {
  return new Promise((resolve) => setTimeout(resolve, milliseconds));
}

/** Cuts the corners of a line, as Chaikin does. */
function rounded(points) {
  const cut = points.slice(1).flatMap(([x, y], index) => {
    const [fromX, fromY] = points[index];
    return [0.25, 0.75].map((share) => [fromX + share * (x - fromX), fromY + share * (y - fromY)]);
  });
  return [points[0], ...cut, points.at(-1)];
}

/** Returns the record of the browser's database: the losses, and the values as base64. */
function stored(page) {
  return page.evaluate(async () => {
    const { load } = await import("./storage.mjs");
    const record = await load();
    const bytes = record && Array.from(record.values, (byte) => String.fromCharCode(byte)).join("");
    return record && { losses: record.progress.losses, accuracies: record.progress.accuracies, values: btoa(bytes) };
  });
}

async function draw(page, points, touch) {
  await page.click("#clear");
  await page.waitForFunction(() => document.getElementById("digit").textContent === "?");
  const field = page.locator("#drawing");
  await field.scrollIntoViewIfNeeded();
  const { x, y, width, height } = await field.boundingBox();
  const places = points.map(([across, down]) => ({ x: x + (across / 100) * width, y: y + (down / 100) * height }));
  if (touch) {
    const client = await page.context().newCDPSession(page);
    await client.send("Input.dispatchTouchEvent", { type: "touchStart", touchPoints: [places[0]] });
    for (const place of places) {
      await client.send("Input.dispatchTouchEvent", { type: "touchMove", touchPoints: [place] });
    }
    await client.send("Input.dispatchTouchEvent", { type: "touchEnd", touchPoints: [] });
  } else {
    await page.mouse.move(places[0].x, places[0].y);
    await page.mouse.down();
    for (const place of places) {
      await page.mouse.move(place.x, place.y, { steps: 4 });
    }
    await page.mouse.up();
  }
  await page.waitForFunction(() => document.getElementById("digit").textContent !== "?");
  return Number(await text(page, "digit"));
}

/** Trains on WebGPU; returns nothing where the browser has none. */
async function trainOnWebgpu(address) {
  const page = await (await browser.newContext()).newPage();
  await page.goto(address);
  if (!(await page.evaluate(async () => Boolean(await navigator.gpu?.requestAdapter())))) {
    return {};
  }
  await page.close();
  const trained = await open(await browser.newContext(), `${address}?webgpu`);
  await trained.click("#train");
  // The first step compiles the shaders.
  await trained.waitForFunction(
    () => document.querySelector("#chart polyline.loss")?.getAttribute("points").split(" ").length >= 8,
  );
  await stop(trained);
  const { losses } = await stored(trained);
  const attention = await trained.evaluate(async () => {
    const ort = await import("./node_modules/onnxruntime-web/dist/ort.webgpu.min.mjs");
    const [{ Trainer }, { Digits }] = await Promise.all([import("./trainer.mjs"), import("./digits.mjs")]);
    const read = async (name) => new Uint8Array(await (await fetch(`model/${name}`)).arrayBuffer());
    const trainer = await Trainer.create(ort, (name) => read(`attention/${name}`), { executionProviders: ["webgpu"] });
    const digits = new Digits(await read("digits.safetensors"));
    const losses = [];
    for (const batch of digits.epoch(0).slice(0, 6)) {
      losses.push(await trainer.step(batch));
    }
    return { losses, accuracy: await digits.accuracy(trainer) };
  });
  return { losses, footer: await text(trained, "footer"), attention };
}

/** Trains, comes back, draws, and starts over. */
async function clickThrough(address) {
  const seen = {};
  const context = await browser.newContext({ viewport: { width: 1040, height: 720 } });
  let page = await open(context, `${address}?threads=2`);
  seen.isolated = await page.evaluate(() => crossOriginIsolated);
  seen.footer = await text(page, "footer");
  seen.first = await text(page, "train");
  await trainUntil(page, 6);
  seen.paused = await text(page, "train");
  seen.before = await stored(page);

  await page.close();
  page = await open(context, `${address}?threads=2`);
  seen.notice = await text(page, "notice");
  seen.continued = await text(page, "train");
  seen.loss = await text(page, "loss");
  await trainUntil(page, 10);
  seen.after = await stored(page);
  seen.accuracy = await text(page, "accuracy");
  await writeFile(values, Buffer.from(seen.after.values, "base64"));
  seen.points = await page
    .locator("#chart polyline.loss")
    .evaluate((line) => line.getAttribute("points").split(" ").length);

  seen.read = [];
  for (const points of DIGITS) {
    seen.read.push(await draw(page, points, false));
  }
  await draw(page, rounded(rounded(DIGITS[3])), false);
  await page.mouse.move(0, 0);
  await pause(500);
  await page.screenshot({ path: screenshot });

  await page.click("#reset");
  await page.waitForFunction(() => document.getElementById("epoch").textContent === "0");
  await page.reload();
  await page.locator("#train:enabled").waitFor();
  seen.reset = {
    train: await text(page, "train"),
    hidden: await page.locator("#notice").isHidden(),
    stored: await stored(page),
  };

  await page.route("**/model/step.onnx", (route) => route.fulfill({ status: 404 }));
  await page.reload();
  await page.locator("#notice:visible").waitFor();
  seen.missing = { notice: await text(page, "notice"), disabled: await page.locator("#train").isDisabled() };

  const phone = await browser.newContext({ ...devices["Pixel 7"] });
  page = await open(phone, address);
  await trainUntil(page, 6);
  seen.touched = [await draw(page, DIGITS[1], true), await draw(page, DIGITS[0], true)];
  seen.overflow = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  return seen;
}

try {
  const address = await new Promise((resolve) => createInterface({ input: server.stdout }).once("line", resolve));
  const seen = await (screenshot ? clickThrough : trainOnWebgpu)(address);
  console.log(JSON.stringify({ ...seen, complaints }));
} finally {
  await browser.close();
  server.kill();
}
