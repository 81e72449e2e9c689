// Figures as people read them. Whatever is not known is a dash, never a zero.

import { now } from "./clock.js";

const DASH = "\u2013";
const whole = new Intl.NumberFormat("en");

export const count = (number) => (number == null ? DASH : whole.format(number));

/** Three figures that count. */
function short(number) {
  const size = Math.abs(number);
  return number.toFixed(size >= 99.95 || size === 0 ? 0 : size >= 9.995 ? 1 : 2);
}

export function duration(seconds) {
  if (seconds == null || !Number.isFinite(seconds)) return DASH;
  if (seconds < 0) return `-${duration(-seconds)}`;
  if (seconds === 0) return "0 s";
  if (seconds < 0.9995) return `${short(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${short(seconds)} s`;
  const full = Math.round(seconds);
  const pair = (big, one, small, other) => `${big} ${one}${small ? ` ${small} ${other}` : ""}`;
  if (full < 3600) return pair(Math.floor(full / 60), "min", full % 60, "s");
  if (full < 86400) return pair(Math.floor(full / 3600), "h", Math.floor((full % 3600) / 60), "min");
  return pair(Math.floor(full / 86400), "d", Math.floor((full % 86400) / 3600), "h");
}

/** How long something still takes, and between what: seconds, least, most. */
export const left = (of) => (of ? `${duration(of.seconds)} (${duration(of.least)} to ${duration(of.most)})` : "");

/** A running clock: as wide in the next second as in this one. */
export function stopwatch(seconds) {
  const full = Math.max(0, seconds);
  return full < 60 ? `${full.toFixed(1)} s` : duration(full);
}

export function gpuTime(seconds) {
  if (seconds == null) return DASH;
  if (seconds < 600) return `${short(seconds)} GPU-s`;
  if (seconds < 3600) return `${short(seconds / 60)} GPU-min`;
  return seconds < 3.6e6 ? `${short(seconds / 3600)} GPU-h` : `${count(Math.round(seconds / 3600))} GPU-h`;
}

const PREFIXES = [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

export function scaled(number) {
  const [size, prefix] = PREFIXES.find(([size]) => Math.abs(number) >= size * 0.9995) ?? [1, ""];
  return `${short(number / size)} ${prefix}`;
}

/** FLOP/s; 0 stands for what is not known. */
export const flops = (number) => (number ? `${scaled(number)}FLOP/s` : DASH);

/** A share in per cent; near 100 with more places, since there the places are what matters. */
export function percent(share) {
  if (share == null) return DASH;
  const value = share * 100;
  if (value > 99.995 || value === 0) return `${value.toFixed(0)} %`;
  return `${value.toFixed(value >= 99 ? 2 : value < 1 ? 2 : 1)} %`;
}

export function number(value) {
  if (value == null) return DASH;
  const size = Math.abs(value);
  if (size !== 0 && (size < 0.001 || size >= 1e6)) return value.toExponential(2);
  return size >= 100 ? value.toFixed(1) : size >= 1 ? value.toFixed(3) : value.toFixed(4);
}

const clockTime = new Intl.DateTimeFormat("en-GB", { timeStyle: "medium" });
const day = new Intl.DateTimeFormat("en-GB", { day: "numeric", month: "short" });
const full = new Intl.DateTimeFormat("en-GB", { dateStyle: "full", timeStyle: "long" });

/** The time of day, and the day where it is another one than today. */
export function time(at) {
  if (!at) return DASH;
  const date = new Date(at * 1000);
  const today = new Date(now() * 1000);
  const hours = clockTime.format(date);
  return date.toDateString() === today.toDateString() ? hours : `${day.format(date)} ${hours}`;
}

export const fullTime = (at) => full.format(new Date(at * 1000));

export function ago(at) {
  const seconds = Math.max(0, now() - at);
  if (seconds < 5) return "just now";
  if (seconds < 60) return `${Math.floor(seconds)} s ago`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  return seconds < 86400 ? `${Math.floor(seconds / 3600)} h ago` : `${Math.floor(seconds / 86400)} d ago`;
}

export const words = (name) => name.replaceAll("_", " ");

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;

/** Sort as a person does: node-2 before node-10. (Intl.Collator takes ten times as long, with 16,384 nodes a second.) */
export function byNumber(items, of = (item) => item) {
  const keys = items.map((item) => [of(item).replace(/\d+/g, (digits) => digits.padStart(12, "0")), item]);
  return keys.sort(([one], [other]) => (one < other ? -1 : one > other ? 1 : 0)).map(([, item]) => item);
}
