// Routes are fragments: `#/instances/UUID/console?kind=serial`.
import { useEffect, useState } from "./view.js";

function parse() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?");
  const parts = path
    .split("/")
    .filter(Boolean)
    .map((part) => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
  return { parts, query: new URLSearchParams(query), path, key: location.hash };
}

export const go = (path) => {
  location.hash = path.startsWith("#") ? path : `#${path}`;
};

export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

/** Changes the query of the current route without a new entry in the history. */
export function setQuery(values) {
  const { path, query } = parse();
  for (const [name, value] of Object.entries(values)) value ? query.set(name, value) : query.delete(name);
  const text = query.toString();
  history.replaceState(null, "", `#/${path}${text ? `?${text}` : ""}`);
}

/** A state that is also in the query of the address, unless it has its default value. */
export function useQueryState(route, name, initial) {
  const [value, setValue] = useState(route.query.get(name) ?? initial);
  const change = (next) => {
    setValue(next);
    setQuery({ [name]: next === initial ? "" : next });
  };
  return [value, change];
}

export function useRoute() {
  const [route, setRoute] = useState(parse);
  useEffect(() => {
    const changed = () => setRoute(parse());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}
