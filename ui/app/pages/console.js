// The consoles of an instance: serial in a terminal, VGA as a remote screen.
import { html, useEffect, useRef, useState } from "../lib/view.js";
import { get, getText, seg } from "../lib/api.js";
import { useLive } from "../lib/live.js";
import { link, setQuery } from "../lib/router.js";
import { Failure, Heading, InstanceState, State } from "../lib/parts.js";
import { openSocket } from "../lib/sockets.js";

/** The number of bytes of earlier output that a serial console shows first. */
const HISTORY = 20000;

/** Moves the focus out of a console, which receives all other keys. */
const leave = () => document.querySelector(".heading .switch [aria-pressed=true]")?.focus();

/** Returns whether a key leaves a console: as in telnet, and unlike Tab, guests do not need it. */
const isLeaveKey = (event) => event.ctrlKey && !event.altKey && !event.metaKey && event.code === "BracketRight";

function Serial({ path, report }) {
  const element = useRef();
  useEffect(() => {
    let closed = false;
    const cleanup = [];
    (async () => {
      const { openTerminal } = await import("../lib/terminal.js");
      const { terminal, fit } = await openTerminal(element.current);
      cleanup.push(() => terminal.dispose());
      terminal.attachCustomKeyEventHandler((event) => {
        if (!isLeaveKey(event)) return true;
        if (event.type === "keydown") leave();
        return false;
      });
      const observer = new ResizeObserver(() => fit());
      observer.observe(element.current);
      cleanup.push(() => observer.disconnect());
      if (closed) return;
      const earlier = await getText(`${path}/consoledata?length=${HISTORY}`).catch(() => "");
      terminal.write(earlier.replaceAll(/\r?\n/g, "\r\n"));
      const { socket } = await openSocket(path, { kind: "serial" });
      cleanup.push(() => socket.close());
      if (closed) {
        socket.close();
        return;
      }
      const encoder = new TextEncoder();
      socket.addEventListener("open", () => {
        report("connected");
        terminal.focus();
      });
      socket.addEventListener("message", (event) =>
        terminal.write(typeof event.data === "string" ? event.data : new Uint8Array(event.data)),
      );
      socket.addEventListener("close", () => {
        if (!closed) report("closed");
      });
      const send = (bytes) => {
        if (socket.readyState === WebSocket.OPEN) socket.send(bytes);
      };
      terminal.onData((text) => send(encoder.encode(text)));
      terminal.onBinary((text) => send(Uint8Array.from(text, (character) => character.charCodeAt(0))));
    })().catch((error) => {
      if (!closed) report("failed", error);
    });
    return () => {
      closed = true;
      for (const end of cleanup.reverse()) end();
    };
  }, []);
  return html`
    <div class="screen serial"><div ref=${element} aria-label="Serial console"></div></div>
  `;
}

function Vga({ path, report, keys }) {
  const element = useRef();
  useEffect(() => {
    let closed = false;
    let screen = null;
    (async () => {
      const { default: RFB } = await import("../vendor/novnc/core/rfb.js");
      const { socket, password } = await openSocket(path, { kind: "vnc" });
      if (closed) {
        socket.close();
        return;
      }
      screen = new RFB(element.current, socket, { credentials: { password: password ?? "" } });
      screen.scaleViewport = true;
      screen.background = "transparent";
      screen.focusOnClick = true;
      keys.current = () => screen.sendCtrlAltDel();
      screen.addEventListener("connect", () => {
        report("connected");
        screen.focus();
      });
      screen.addEventListener("disconnect", () => {
        if (!closed) report("closed");
      });
      screen.addEventListener("securityfailure", (event) =>
        report("failed", new Error(event.detail.reason ?? "the display rejected the password")),
      );
    })().catch((error) => {
      if (!closed) report("failed", error);
    });
    return () => {
      closed = true;
      keys.current = null;
      screen?.disconnect();
    };
  }, []);
  const key = (event) => {
    if (!isLeaveKey(event)) return;
    event.stopPropagation();
    event.preventDefault();
    leave();
  };
  return html`
    <div class="screen" onKeyDownCapture=${key}><div ref=${element} aria-label="Screen"></div></div>
  `;
}

export default function Console({ route }) {
  const id = route.parts[1];
  const path = `/instances/${seg(id)}`;
  const { value: instance, error } = useLive(() => get(path), [`instance/${id}`], [path]);
  const [kind, setKind] = useState(route.query.get("kind") === "vga" ? "vga" : "serial");
  const [attempt, setAttempt] = useState(0);
  const [status, setStatus] = useState({ state: "connecting" });
  const keys = useRef(null);
  const report = (state, failure) => setStatus({ state, error: failure });
  const choose = (next) => {
    setKind(next);
    setQuery({ kind: next });
    again();
  };
  const again = () => {
    setStatus({ state: "connecting" });
    setAttempt((n) => n + 1);
  };
  const View = kind === "vga" ? Vga : Serial;
  // The browser shows VNC displays only.
  const isForeign = kind === "vga" && instance && instance.video.vdi !== "vnc";
  const tone = { connected: "good", connecting: "busy" }[status.state] ?? "bad";
  return html`
    <${Heading}
      title=${`${instance?.name ?? "…"} console`}
      up=${["Instance", link("instances", id)]}
      status=${html`
        ${
          instance
            ? html`
                <${InstanceState} instance=${instance} />
              `
            : null
        }
        ${
          isForeign
            ? null
            : html`
                <${State} value=${status.state} tone=${tone} />
              `
        }
      `}
    >
      <div class="switch" role="group" aria-label="Console">
        <button type="button" aria-pressed=${kind === "serial"} onClick=${() => choose("serial")}>Serial</button>
        <button type="button" aria-pressed=${kind === "vga"} onClick=${() => choose("vga")}>Screen</button>
      </div>
      ${
        kind === "vga"
          ? html`
              <button type="button" onClick=${() => keys.current?.()}>Ctrl-Alt-Del</button>
            `
          : null
      }
      ${
        ["closed", "failed"].includes(status.state)
          ? html`
              <button type="button" class="primary" onClick=${again}>Reconnect</button>
            `
          : null
      }
    <//>
    <${Failure} error=${error ?? status.error} />
    ${
      !instance
        ? null
        : isForeign
          ? html`
              <p class="empty">
                The browser shows VNC displays. The display of this instance is SPICE: open it with
                <code>muster instance vdi ${instance.name}</code>
              </p>
            `
          : html`
              <${View} key=${`${kind}${attempt}`} path=${path} report=${report} keys=${keys} />
              <p class="hint">
                <kbd>Ctrl ]</kbd>${" leaves the console, so that Tab reaches the other controls."}
              </p>
            `
    }
  `;
}
