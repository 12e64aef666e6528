// Live state: one event stream, and collections and records that are read again when an event names them.
import { get, getPage, url } from "./api.js";
import { useCallback, useEffect, useRef, useState } from "./view.js";

const MAX_RECENT = 500;
/** Milliseconds that events are collected before records are read again. */
const COLLECT = 60;
/** More changed records than this are read as one list. */
const MAX_SINGLE_READS = 12;
/** The number of records that are shown before the rest of a list is read. */
const FIRST_PAGE = 60;
const NEXT_PAGE = 1000;
/** Milliseconds that the first reads wait for the stream, so that they need not be repeated. */
const START_TIMEOUT = 250;
/** Milliseconds between reads of a whole list. */
const LIST_PAUSE = 1000;
const RETRY_PAUSE = 2000;
/** Milliseconds after which a hidden page closes its stream. */
const HIDDEN_PAUSE = 30000;

/** Types of periodic events. */
const MEASUREMENTS = ["usage", "resources", "prune"];
/** Events of every request, which would hide the others. */
const REQUESTS = [
  "token used to authenticate request",
  "token created from key",
  "token created from login ticket",
  "login ticket created",
  "api request received",
  "api response sent",
];

/** Returns whether an event changes no record. */
const changesNothing = (event) =>
  MEASUREMENTS.includes(event.event_type) || event.message === "screenshot request from REST API";

/** Returns whether an event is left out of summaries. */
export const isRoutine = (event) => changesNothing(event) || REQUESTS.includes(event.message);

const listeners = new Set();
const statusListeners = new Set();
/** Events, newest first. */
export const recent = [];
let source = null;
let status = "closed";
let lastId = "";
let hideTimer = null;
let isStarted;
let started = new Promise((resolve) => {
  isStarted = resolve;
});

function setStatus(next) {
  status = next;
  for (const listener of statusListeners) listener(next);
}

function parse(message) {
  lastId = message.lastEventId || lastId;
  try {
    return JSON.parse(message.data);
  } catch {
    return null;
  }
}

/** Adds an event. The stream sends an event of several objects once for each. */
function add(event) {
  const object = { type: event.object_type, uuid: event.object_uuid };
  const known = recent.find((other) => other.event_uuid === event.event_uuid);
  if (known) {
    if (known.objects.some((other) => other.type === object.type && other.uuid === object.uuid)) return;
    known.objects = [...known.objects, object];
  } else {
    recent.unshift({ ...event, objects: [object], live: true });
    recent.length = Math.min(recent.length, MAX_RECENT);
  }
  notify({ ...event, objects: [object] });
}

function notify(event) {
  for (const listener of listeners) listener(event);
}

/** Opens a stream again that the server rejected, unless the session has ended. */
async function retry(failed) {
  try {
    await get("/auth/session");
  } catch (error) {
    if (error.status === 401) return;
  }
  setTimeout(() => {
    if (source === failed) openStream();
  }, RETRY_PAUSE);
}

/** Opens the event stream. The browser reconnects by itself and continues after the last message. */
export function openStream() {
  source?.close();
  const address = url("/events/stream");
  if (lastId) address.searchParams.set("last_event_id", lastId);
  const late = setTimeout(() => {
    isStarted(false);
  }, START_TIMEOUT);
  source = new EventSource(address);
  source.addEventListener("started", (message) => {
    clearTimeout(late);
    // What was read before the stream started may have changed since.
    if (lastId || status === "late") reloadAll();
    parse(message);
    setStatus("live");
    isStarted(true);
  });
  source.addEventListener("open", () => {
    if (status !== "live") setStatus("late");
  });
  source.addEventListener("error", () => {
    setStatus("reconnecting");
    if (source?.readyState === EventSource.CLOSED) retry(source);
  });
  source.addEventListener("reset", reloadAll);
  source.addEventListener("event", (message) => {
    const event = parse(message);
    if (event) add(event);
  });
  source.addEventListener("change", (message) => {
    const change = parse(message);
    if (change) notify({ objects: [{ type: change.object_type, uuid: change.uuid ?? change.object_uuid }] });
  });
}

export function closeStream() {
  source?.close();
  source = null;
  lastId = "";
  started = new Promise((resolve) => {
    isStarted = resolve;
  });
  setStatus("closed");
}

// Browsers limit the connections to one server, so tabs in the background give theirs up.
document.addEventListener("visibilitychange", () => {
  clearTimeout(hideTimer);
  if (document.hidden)
    hideTimer = setTimeout(() => {
      if (source) {
        source.close();
        setStatus("reconnecting");
      }
    }, HIDDEN_PAUSE);
  else if (source?.readyState === EventSource.CLOSED) openStream();
});

// A page that the browser keeps for its history must not keep the connection.
addEventListener("pagehide", () => source?.close());
addEventListener("pageshow", (event) => {
  if (event.persisted && source) openStream();
});

/** Returns the objects that an event concerns, as `{type, uuid}`. */
export const objectsOf = (event) => event.objects ?? [];

export function useEvents(callback) {
  const latest = useRef(callback);
  latest.current = callback;
  useEffect(() => {
    const listener = (event) => latest.current(event);
    listeners.add(listener);
    return () => listeners.delete(listener);
  }, []);
}

export function useStreamStatus() {
  const [value, setValue] = useState(status);
  useEffect(() => {
    statusListeners.add(setValue);
    setValue(status);
    return () => statusListeners.delete(setValue);
  }, []);
  return value;
}

const collections = [];
const reloaders = new Set();

function reloadAll() {
  for (const collection of collections) collection.invalidate();
  for (const reload of reloaders) reload();
}

/** All records of one type that the caller can see, by id. */
class Collection {
  constructor(type, path, idOf) {
    Object.assign(this, { type, path, idOf });
    this.clear();
    this.subscribers = new Set();
    collections.push(this);
    listeners.add((event) => {
      if (changesNothing(event)) return;
      for (const object of objectsOf(event)) if (object.type === type) this.touch(object.uuid);
    });
  }

  clear() {
    this.records = new Map();
    this.loaded = false;
    this.error = null;
    this.dirty = new Set();
    this.loading = null;
    this.list = [];
  }

  changed() {
    this.list = [...this.records.values()];
    for (const subscriber of this.subscribers) subscriber();
  }

  load() {
    this.loading ??= started
      .then(() => this.read())
      .then(
        (records) => {
          this.records = records;
          this.loaded = true;
          this.error = null;
        },
        (error) => {
          this.error = error;
        },
      )
      .then(() => {
        this.loading = null;
        this.changed();
        if (this.dirty.size) this.schedule();
      });
    return this.loading;
  }

  /** Reads all records. The first ones are shown while the rest of a long list is read. */
  async read() {
    const records = new Map();
    let page = await getPage(this.path, FIRST_PAGE);
    for (;;) {
      for (const record of page.records) records.set(this.idOf(record), record);
      if (!page.cursor) return records;
      if (!this.loaded) {
        this.records = records;
        this.changed();
      }
      page = await getPage(this.path, NEXT_PAGE, page.cursor);
    }
  }

  invalidate() {
    if (this.subscribers.size) this.load();
    else this.loaded = false;
  }

  /** Notes that a record changed. */
  touch(id) {
    if (!this.loaded && !this.loading) return;
    if (!this.subscribers.size) {
      this.loaded = false;
      return;
    }
    this.dirty.add(id);
    this.schedule();
  }

  schedule() {
    this.timer ??= setTimeout(() => this.refresh(), COLLECT);
  }

  /** Reads changed records again. Changes during a read of the list follow it. */
  async refresh() {
    const ids = [...this.dirty];
    if (!this.loading) {
      this.dirty.clear();
      if (ids.length > MAX_SINGLE_READS) {
        await this.load();
        await new Promise((resolve) => {
          setTimeout(resolve, LIST_PAUSE);
        });
      } else {
        await Promise.all(ids.map((id) => this.refreshOne(id)));
        this.changed();
      }
    }
    this.timer = null;
    if (this.dirty.size && !this.loading) this.schedule();
  }

  async refreshOne(id) {
    try {
      const record = await get(`${this.path}/${encodeURIComponent(id)}`, { quiet: true });
      if (!record || record.state === "deleted") this.records.delete(id);
      else this.records.set(this.idOf(record), record);
    } catch (error) {
      if (error.status === 404) this.records.delete(id);
    }
  }
}

const byUuid = (record) => record.uuid;
export const instances = new Collection("instance", "/instances", byUuid);
export const networks = new Collection("network", "/networks", byUuid);
export const artifacts = new Collection("artifact", "/artifacts", byUuid);
export const blobs = new Collection("blob", "/blobs", byUuid);
export const nodes = new Collection("node", "/nodes", byUuid);
export const namespaces = new Collection("namespace", "/auth/namespaces", (record) => record.name);

const clearers = new Set();
/** Calls `clear` when a session ends. */
export const onSessionEnd = (clear) => clearers.add(clear);

/** Forgets what a former session has read. */
export function clearAll() {
  for (const collection of collections) collection.clear();
  for (const clear of clearers) clear();
  recent.length = 0;
}

/** Returns a collection's records and whether they are loaded; keeps the component current. */
export function useCollection(collection, enabled = true) {
  const [, update] = useState(0);
  const shown = useRef();
  shown.current = collection.list;
  useEffect(() => {
    if (!enabled) return undefined;
    const subscriber = () => update((n) => n + 1);
    collection.subscribers.add(subscriber);
    if (!collection.loaded) collection.load();
    // A read that another page started may have ended since the component was rendered.
    if (shown.current !== collection.list) subscriber();
    return () => collection.subscribers.delete(subscriber);
  }, [collection, enabled]);
  return { records: collection.list, loaded: collection.loaded, error: collection.error };
}

/**
 * Reads `read()` now, when `dependencies` change, and when an event concerns one of `objects` (`type/uuid`, or `type/*` for
 * all of a type); with `measured`, also when the event is a measurement.
 */
export function useLive(read, objects, dependencies, { measured = false } = {}) {
  const [state, setState] = useState({ value: undefined, error: null });
  const latest = useRef({});
  latest.current = { read, objects: new Set(objects) };
  const run = useRef(0);
  const timer = useRef(null);
  const reload = useCallback(async () => {
    const turn = ++run.current;
    try {
      await started;
      const value = await latest.current.read();
      if (turn === run.current) setState({ value, error: null });
    } catch (error) {
      if (turn === run.current) setState((old) => ({ value: old.value, error }));
    }
  }, []);
  useEffect(() => {
    setState({ value: undefined, error: null });
    reload();
    reloaders.add(reload);
    return () => {
      reloaders.delete(reload);
      run.current++;
      clearTimeout(timer.current);
      timer.current = null;
    };
  }, dependencies);
  useEvents((event) => {
    if (!measured && changesNothing(event)) return;
    const wanted = latest.current.objects;
    if (!objectsOf(event).some(({ type, uuid }) => wanted.has(`${type}/${uuid}`) || wanted.has(`${type}/*`))) return;
    timer.current ??= setTimeout(() => {
      timer.current = null;
      reload();
    }, COLLECT);
  });
  return { ...state, reload };
}
