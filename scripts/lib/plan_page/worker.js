// Runs Python beside the page. All that Pyodide fetches is in the page: nothing is asked of a network.
// Pyodide's own scripts stand above this one.

const BASE = "https://in-the-page.invalid/";
let files = {};
self.fetch = async (request) => {
  const name = String(request.url ?? request).split("/").pop();
  if (!(name in files)) throw new Error(`${name} is not in the page`);
  const type = name.endsWith(".wasm") ? "application/wasm" : "application/octet-stream";
  return new Response(files[name], { headers: { "Content-Type": type } });
};

let asking = null;
async function start() {
  const python = await loadPyodide({ indexURL: BASE, fullStdLib: false });
  python.unpackArchive(files["planner.zip"], "zip", { extractDir: "/planner" });
  python.runPython(`
import sys
sys.path.insert(0, "/planner")
import absent
absent.install()
import ask
`);
  return python.globals.get("ask").ask;
}

self.onmessage = async ({ data }) => {
  try {
    if (data.files) {
      files = data.files;
      asking = start();
      await asking;
      self.postMessage({ ready: true });
    } else {
      const ask = await asking;
      self.postMessage({ number: data.number, answer: JSON.parse(ask(data.question)) });
    }
  } catch (error) {
    self.postMessage({ number: data.number, failed: String(error) });
  }
};
