// Small pictures of the screens of running instances, taken through the API only while they are visible.
import { html, useEffect, useRef, useState } from "./view.js";
import { get, getBlob, seg } from "./api.js";
import { onSessionEnd } from "./live.js";

const WIDTH = 48;
const HEIGHT = 30;
/** Screenshots that are taken at the same time. */
const MAX_CONCURRENT = 2;
const MAX_KEPT = 300;
/** Milliseconds that a row is visible before its screenshot is taken, so that scrolling takes none. */
const PAUSE = 300;

/** Pictures by the id of the instance: `{version, picture}`, without a picture if none could be taken. */
const kept = new Map();
const waiting = [];
let running = 0;

/** Returns what a screenshot depends on; it is taken again when an event has changed this. */
const versionOf = (vm) => `${vm.power_state_since} ${vm.generation} ${vm.agent_state} ${vm.agent_start_time}`;

async function take(vm) {
  const blob = await getBlob(`/blobs/${seg(await get(`/instances/${seg(vm.uuid)}/screenshot`))}/data`);
  const scale = devicePixelRatio || 1;
  return createImageBitmap(blob, {
    resizeWidth: Math.round(WIDTH * scale),
    resizeHeight: Math.round(HEIGHT * scale),
    resizeQuality: "medium",
  });
}

/** Takes the screenshots that are waiting, newest request first. */
async function work() {
  if (running >= MAX_CONCURRENT) return;
  const request = waiting.pop();
  if (!request) return;
  running++;
  const version = versionOf(request.vm);
  let picture = null;
  try {
    picture = await take(request.vm);
  } catch {
    /* the instance has stopped, or its node does not answer: its row has no picture */
  }
  kept.delete(request.vm.uuid);
  kept.set(request.vm.uuid, { version, picture });
  if (kept.size > MAX_KEPT) kept.delete(kept.keys().next().value);
  running--;
  request.done();
  work();
}

/** Requests a screenshot; returns a function that withdraws the request. */
function request(vm, done) {
  const entry = { vm, done };
  waiting.push(entry);
  work();
  return () => {
    const index = waiting.indexOf(entry);
    if (index >= 0) waiting.splice(index, 1);
  };
}

onSessionEnd(() => kept.clear());

export function Thumbnail({ instance }) {
  const canvas = useRef();
  const [, update] = useState(0);
  const on = instance.state === "created" && instance.power_state === "on";
  const version = versionOf(instance);
  const known = on ? kept.get(instance.uuid) : undefined;
  useEffect(() => {
    if (!on || known?.version === version) return undefined;
    let withdraw = () => {};
    const timer = setTimeout(() => {
      withdraw = request(instance, () => update((n) => n + 1));
    }, PAUSE);
    return () => {
      clearTimeout(timer);
      withdraw();
    };
  }, [instance.uuid, on, version]);
  const picture = known?.picture;
  useEffect(() => {
    if (!picture) return;
    canvas.current.width = picture.width;
    canvas.current.height = picture.height;
    canvas.current.getContext("2d").drawImage(picture, 0, 0);
  }, [picture]);
  if (!picture)
    return html`
      <span class="thumbnail" aria-hidden="true"></span>
    `;
  return html`
    <canvas class="thumbnail" ref=${canvas} role="img" aria-label=${`Screen of ${instance.name}`}></canvas>
  `;
}
