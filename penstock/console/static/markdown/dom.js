// Makes elements; children are nodes, strings and lists of them. Text of a model only ever becomes text nodes and checked attributes, so it cannot become markup.

const MATHML = "http://www.w3.org/1998/Math/MathML";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) if (value != null) element.setAttribute(name, value);
  for (const child of children.flat()) element.append(child);
  return element;
}

export const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
export const math = (tag, attributes = {}, ...children) => fill(document.createElementNS(MATHML, tag), attributes, children);
