// Perfetto's trace processor outside of a browser: node trace_processor.js ENGINE_BUNDLE
//
// The engine of Perfetto's page is a web worker around trace_processor.wasm. Here it is given what it asks a worker for, and its
// messages go through standard input and output: bytes of TraceProcessorRpcStream both ways.
"use strict";
const fs = require("fs");
const path = require("path");

const bundle = path.resolve(process.argv[2]);
const exit = (error) => { process.stderr.write(`${error && error.stack || error}\n`); process.exit(1); };
const all = (data) => { for (let at = 0; at < data.length;) at += fs.writeSync(1, data, at); };

class FileRequest {  // the engine loads its wasm by a synchronous request
  open(method, address) { this.address = address; }
  send() {
    const data = fs.readFileSync(path.join(path.dirname(bundle), path.basename(this.address)));
    this.status = 200;
    this.response = data.buffer.slice(data.byteOffset, data.byteOffset + data.length);
  }
}

const console_ = { log() {}, warn: console.error, error: console.error };  // standard output is for answers
const worker = { location: { href: `file://${bundle}` } };
new Function("process", "self", "WorkerGlobalScope", "XMLHttpRequest", "console", fs.readFileSync(bundle, "utf8"))(
  undefined, worker, class {}, FileRequest, console_);
const port = { postMessage: all };
worker.onmessage({ data: port });
setImmediate(() => {  // the engine is ready when its promises are through
  process.stdin.on("data", (data) => { try { port.onmessage({ data: new Uint8Array(data) }); } catch (error) { exit(error); } });
  process.stdin.on("end", () => process.exit(0));
});
process.on("unhandledRejection", exit);
