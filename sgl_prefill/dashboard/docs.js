"use strict";
// Lists the routes of /openapi.json with the fields of their requests and replies.
(() => {
const KEY = "sgl_prefill.key", DEEPEST = 8;
const $ = (id) => document.getElementById(id);
const storage = (() => { try { return window.sessionStorage; } catch { return null; } })();
document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";

function element(tag, children = [], className = "") {
  const made = document.createElement(tag);
  made.append(...[children].flat());
  if (className) made.className = className;
  return made;
}
function table(head, rows) {
  const row = (tag, cells) => element("tr", cells.map((cell) => element(tag, cell)));
  return element("table", [element("thead", row("th", head)), element("tbody", rows.map((cells) => row("td", cells)))]);
}

function show({ info, paths, components }) {
  const schemas = components.schemas;
  const named = (schema) => schema.$ref ? schemas[schema.$ref.split("/").pop()] : schema;
  const choices = (schema) => (schema.anyOf ?? schema.oneOf ?? [schema]).filter((one) => one.type !== "null");
  const type = (schema) => choices(schema).map((one) => {
    const found = named(one);
    return found.type === "array" ? `list of ${type(found.items ?? {})}` : found.type ?? (found.enum ? "text" : "any");
  }).filter((name, place, all) => all.indexOf(name) === place).join(" or ");
  // The fields below a schema as rows, by path: `labels[].logprob`.
  function fields(schema, prefix = "", depth = 0) {
    if (depth > DEEPEST) return [];
    return choices(schema).flatMap((one) => {
      const found = named(one);
      if (found.type === "array") return fields(found.items ?? {}, `${prefix}[]`, depth + 1);
      return Object.entries(found.properties ?? {}).flatMap(([name, field]) => {
        const path = prefix ? `${prefix}.${name}` : name;
        const needed = (found.required ?? []).includes(name);
        return [{ path, needed, type: type(field), text: field.description ?? "" }, ...fields(field, path, depth + 1)];
      });
    });
  }
  const schemaOf = (content) => Object.values(content ?? {})[0]?.schema;
  function request(schema) {
    const all = Object.entries(named(schema).properties ?? {}), needed = named(schema).required ?? [];
    const told = all.filter(([name, field]) => field.description || needed.includes(name));
    const others = all.filter((one) => !told.includes(one)).map(([name]) => name);
    return [table(["request field", "type", "meaning"], told.map(([name, field]) => [name, type(field), `${needed.includes(name) ? "Required. " : ""}${field.description ?? ""}`])),
      ...(others.length ? [element("p", `Other fields: ${others.join(", ")}`, "note")] : [])];
  }
  function reply(status, { description, content }) {
    const schema = schemaOf(content), rows = schema ? fields(schema) : [];
    return [element("p", `${status}: ${description}${content ? `, ${Object.keys(content).join(", ")}` : ""}`),
      ...(rows.length ? [table(["reply field", "type", "meaning"], rows.map((row) => [row.path, row.needed ? row.type : `${row.type}, optional`, row.text]))] : [])];
  }
  function route(path, method, operation) {
    const body = schemaOf(operation.requestBody?.content), parameters = operation.parameters ?? [];
    return element("details", [
      element("summary", [element("code", `${method.toUpperCase()} ${path}`), ` ${operation.summary ?? ""}`]),
      ...(operation.description ? [element("p", operation.description)] : []),
      ...(parameters.length ? [table(["parameter", "type", "meaning"], parameters.map((one) => [one.name, type(one.schema), one.description ?? ""]))] : []),
      ...(body ? choices(body).flatMap(request) : []),
      ...Object.entries(operation.responses).flatMap(([status, one]) => reply(status, one)),
    ]);
  }
  const routes = Object.entries(paths).flatMap(([path, operations]) => Object.entries(operations).map(([method, operation]) => [path, method, operation]));
  const ours = routes.filter(([, method, operation]) => operation.tags?.includes("sgl_prefill") && method !== "put");
  const theirs = routes.filter(([, , operation]) => !operation.tags?.includes("sgl_prefill"));
  const section = (title, list) => element("section", [element("h2", title), ...list.map((one) => route(...one))]);
  $("version").textContent = info.version;
  $("status").textContent = info.description;
  $("routes").replaceChildren(section("Label scoring", ours), section("SGLang's routes", theirs));
}

async function load() {
  const key = storage?.getItem(KEY);
  const answer = await fetch("openapi.json", { headers: key ? { authorization: `Bearer ${key}` } : {} });
  $("key-form").hidden = answer.status !== 401;
  if (answer.ok) show(await answer.json());
  else $("status").textContent = answer.status === 401 ? "this server asks for a key" : `openapi.json: the server answers ${answer.status}`;
}
$("key-form").onsubmit = (event) => {
  event.preventDefault();
  storage?.setItem(KEY, $("key").value);
  load();
};
load();
})();
