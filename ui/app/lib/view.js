// The view library: Preact with htm templates. All values in templates become text or attributes, never markup.
import { h, render, Fragment } from "preact";
import htm from "../vendor/htm/htm.mjs";

export { h, render, Fragment };
export { useState, useEffect, useLayoutEffect, useMemo, useRef, useCallback } from "preact/hooks";
export const html = htm.bind(h);
