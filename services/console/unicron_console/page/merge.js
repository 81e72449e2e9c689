// How changes become part of the page that is known. No element and no clock in here.

const EVENTS = 500; // of the feed that are kept

/**
 * Merge changes of the cluster into `page`, in place.
 * @returns {{nodes: string[], shape: boolean}} the nodes that changed; whether one came or went.
 */
export function merge(page, changes) {
  const { nodes = {}, tasks = [], events = [], course = [], ...rest } = changes;
  Object.assign(page, rest);
  if (course.length) page.course = course;
  if (events.length) page.events = page.events.concat(events).slice(-EVENTS);
  mergeTasks(page, tasks);
  let shape = false;
  for (const [name, square] of Object.entries(nodes)) {
    if (square.state === "") {
      shape ||= page.nodes.delete(name);
    } else {
      shape ||= !page.nodes.has(name);
      page.nodes.set(name, square);
    }
  }
  return { nodes: Object.keys(nodes), shape };
}

function mergeTasks(page, tasks) {
  for (const line of tasks) {
    if (line.state === "removed") page.tasks.delete(line.name);
    else page.tasks.set(line.name, line);
  }
}

/** Return a page as it is kept: nodes and tasks by name, whatever the names are. */
export function keep(whole) {
  return {
    ...whole,
    nodes: new Map(Object.entries(whole.nodes ?? {})),
    tasks: new Map((whole.tasks ?? []).map((line) => [line.name, line])),
    events: whole.events ?? [],
    course: whole.course ?? [],
    failures: whole.failures ?? [],
  };
}

/** Return the failures of which something is still to be healed. */
export const healing = (failures) => failures.filter((line) => !line.over);
