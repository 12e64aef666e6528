// WebSockets of consoles and of commands in guests.
import { BASE, post } from "./api.js";

/** Requests a one-time ticket for a console of the instance at `path`, and opens its WebSocket. */
export async function openSocket(path, request) {
  const ticket = await post(`${path}/console-tickets`, request);
  const address = new URL(ticket.path.replace(/^\//, ""), BASE);
  address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
  const socket = new WebSocket(address, ["binary", `muster-ticket.${ticket.ticket}`]);
  socket.binaryType = "arraybuffer";
  return { socket, password: ticket.password };
}

/** The types of frames: a byte for the type, two for the length, and the payload. See docs/decisions/0044. */
const DATA = 0;
const EXITED = 2;
const FAILED = 3;
/** Milliseconds after which the server gets a sign of life. */
const KEEPALIVE = 20000;
const INTERRUPT = 3;

/** Takes the complete frames from the start of some bytes. Returns them as `[type, payload]`, and the rest. */
function takeFrames(bytes) {
  const frames = [];
  let start = 0;
  while (bytes.length - start >= 3) {
    const end = start + 3 + (bytes[start + 1] << 8) + bytes[start + 2];
    if (bytes.length < end) break;
    frames.push([bytes[start], bytes.subarray(start + 3, end)]);
    start = end;
  }
  return [frames, bytes.slice(start)];
}

function concat(one, other) {
  const both = new Uint8Array(one.length + other.length);
  both.set(one);
  both.set(other, one.length);
  return both;
}

/**
 * Runs a command with a terminal in the guest of the instance at `path`. Calls `output` with its output, and then `ended` once
 * with `{code}`, or with `{reason}` if the code is unknown, or with `{refused: true}` if the command did not start. Returns
 * functions that interrupt the command, and that end it by closing the connection.
 */
export function runCommand(path, commandLine, { output, ended }) {
  let socket = null;
  let isOpen = false;
  let isOver = false;
  let keepalive = null;
  let rest = new Uint8Array();
  const decoder = new TextDecoder();
  const finish = (result) => {
    if (isOver) return;
    isOver = true;
    clearInterval(keepalive);
    socket?.close();
    ended(result);
  };
  const receive = (event) => {
    let frames;
    [frames, rest] = takeFrames(concat(rest, new Uint8Array(event.data)));
    for (const [type, payload] of frames) {
      if (isOver) return;
      if (type === DATA) output(decoder.decode(payload, { stream: true }));
      else if (type === EXITED) finish({ code: new DataView(payload.buffer, payload.byteOffset).getInt32(0) });
      else if (type === FAILED) finish({ reason: decoder.decode(payload) });
    }
  };
  (async () => {
    const opened = await openSocket(path, {
      kind: "terminal",
      command_line: commandLine,
      term: "dumb",
      rows: 50,
      columns: 200,
    });
    socket = opened.socket;
    if (isOver) {
      socket.close();
      return;
    }
    socket.addEventListener("open", () => {
      isOpen = true;
      keepalive = setInterval(() => socket.send(new Uint8Array([DATA, 0, 0])), KEEPALIVE);
    });
    socket.addEventListener("message", receive);
    socket.addEventListener("close", (event) =>
      finish(isOpen ? { reason: event.reason || "the connection was closed" } : { refused: true }),
    );
  })().catch((error) => finish({ error }));
  return {
    interrupt: () => {
      if (isOpen && !isOver) socket.send(new Uint8Array([DATA, 0, 1, INTERRUPT]));
    },
    end: () => finish({ reason: "ended" }),
  };
}
