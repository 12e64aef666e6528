// Uploads: data in chunks, which continue after an interruption.
import { get, post, postBytes } from "./api.js";

const CHUNK = 4 * 1024 * 1024;
const MAX_RETRIES = 5;

const keyOf = (file) => `muster.upload.${file.name}.${file.size}.${file.lastModified}`;

function remembered(file) {
  try {
    return localStorage.getItem(keyOf(file));
  } catch {
    return null;
  }
}

function remember(file, id) {
  try {
    id ? localStorage.setItem(keyOf(file), id) : localStorage.removeItem(keyOf(file));
  } catch {
    /* storage is disabled */
  }
}

const pause = (milliseconds) =>
  new Promise((resolve) => {
    setTimeout(resolve, milliseconds);
  });

/** Returns an upload of this file that was interrupted earlier, or a new one. */
async function open(file) {
  const id = remembered(file);
  if (id) {
    try {
      const upload = await get(`/upload/${id}`);
      if (upload.size <= file.size) return upload;
    } catch (error) {
      if (error.status !== 404) throw error;
    }
  }
  const upload = await post("/upload");
  remember(file, upload.uuid);
  return { ...upload, size: 0 };
}

/** Sends a file and creates an artifact from it. `report(done)` is called with the number of bytes sent. */
export async function uploadFile(file, name, { signal, report, values }) {
  const upload = await open(file);
  let done = upload.size;
  let failures = 0;
  report(done);
  while (done < file.size) {
    if (signal.aborted) throw new DOMException("paused", "AbortError");
    try {
      const chunk = await file.slice(done, done + CHUNK).arrayBuffer();
      done = await postBytes(`/upload/${upload.uuid}?offset=${done}`, chunk, { signal });
      failures = 0;
    } catch (error) {
      const temporary = error.status === 0 || error.status >= 500 || error.status === 409 || error.status === 429;
      if (error.name === "AbortError" || !temporary || ++failures > MAX_RETRIES) throw error;
      await pause(400 * 2 ** failures);
      done = (await get(`/upload/${upload.uuid}`)).size;
    }
    report(done);
  }
  const artifact = await post(`/artifacts/upload/${encodeURIComponent(name)}`, { upload_uuid: upload.uuid, ...values });
  remember(file, null);
  return artifact;
}
