// One line, area or bar chart. ECharts is loaded with the first chart.

import { h, onBeforeUnmount, onMounted, ref, watch } from "./lib/vue.js";

let library;
const load = () => (library ??= import("./lib/echarts/index.js").then((module) => module.echarts));

export const COLOURS = ["#0f766e", "#d97706", "#4f46e5", "#be185d", "#65a30d", "#0284c7"];
const ON_DARK = ["#2dd4bf", "#fbbf24", "#a5b4fc", "#f472b6", "#a3e635", "#38bdf8"];
const dark = () => document.body.classList.contains("body--dark");

export default {
  props: { title: String, option: Object, label: String, tall: { type: Number, default: 210 } },
  setup(props) {
    const holder = ref(null);
    let chart;
    let watcher;
    const draw = () => chart?.setOption({ animation: false, color: dark() ? ON_DARK : COLOURS, ...props.option }, { notMerge: true });
    onMounted(async () => {
      const echarts = await load();
      if (!holder.value) return;
      chart = echarts.init(holder.value, dark() ? "dark" : null, { renderer: "svg" });
      watcher = new ResizeObserver(() => chart.resize());
      watcher.observe(holder.value);
      draw();
    });
    onBeforeUnmount(() => {
      watcher?.disconnect();
      chart?.dispose();
    });
    watch(() => props.option, draw);
    return () =>
      h("figure", { class: "chart", style: "margin:0", role: "img", "aria-label": props.label || props.title }, [
        h("h3", props.title),
        h("div", { class: "canvas", style: `height: ${props.tall}px`, ref: holder }),
      ]);
  },
};

// The legend has a line of its own below the title, and scrolls where it does not fit.
const LEGEND = { type: "scroll", top: 0, left: 4, icon: "roundRect", itemWidth: 14, itemHeight: 8, itemGap: 16, textStyle: { fontSize: 12 } };
export const FRAME = { backgroundColor: "transparent", grid: { left: 12, right: 34, top: 36, bottom: 6, containLabel: true }, legend: LEGEND };
const SMALL = { fontSize: 11, hideOverlap: true };

export function lines(times, series, { unit = "", max } = {}) {
  return {
    ...FRAME,
    legend: series.length > 1 ? LEGEND : undefined,
    grid: { ...FRAME.grid, top: series.length > 1 ? 36 : 14 },
    tooltip: { trigger: "axis", valueFormatter: (v) => (v == null ? "–" : `${Number(v.toPrecision(3))}${unit}`) },
    xAxis: { type: "category", data: times, boundaryGap: false, axisLabel: SMALL },
    yAxis: { type: "value", min: 0, max, axisLabel: { ...SMALL, formatter: (v) => `${v}${unit}` }, splitNumber: 3, interval: max === 100 ? 25 : undefined },
    series: series.map(({ name, data }) => ({ name, data, type: "line", showSymbol: false, connectNulls: false, areaStyle: { opacity: 0.08 } })),
  };
}

const stacked = (series) => series.map(({ name, data }) => ({ name, data, type: "bar", stack: "all", barMaxWidth: 28 }));
const framed = (series, show) => ({
  ...FRAME,
  legend: series.length > 1 ? LEGEND : undefined,
  grid: { ...FRAME.grid, top: series.length > 1 ? 36 : 14 },
  tooltip: { trigger: "axis", axisPointer: { type: "shadow" }, valueFormatter: show },
  series: stacked(series),
});
const values = (show) => ({ type: "value", axisLabel: { ...SMALL, formatter: show }, splitNumber: 3 });

// Columns over time.
export const stacks = (times, series, show) => ({ ...framed(series, show), xAxis: { type: "category", data: times, axisLabel: SMALL }, yAxis: values(show) });
// One bar for each name, from the top; long names are cut.
export const bars = (names, series, show) => ({ ...framed(series, show), xAxis: values(show), yAxis: { type: "category", data: names, inverse: true, axisLabel: { ...SMALL, width: 150, overflow: "truncate" } } });
