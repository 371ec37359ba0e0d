// @ts-check
// The shared worker of all tabs: see hub.js.

import { serve } from "./hub.js";

globalThis.onconnect = ({ ports }) => serve(ports[0]);
