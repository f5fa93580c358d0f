// One line, area or bar chart. ECharts is loaded with the first chart.

import { h, onBeforeUnmount, onMounted, ref, watch } from "./lib/vue.js";

let library;
const load = () => (library ??= import("./lib/echarts/index.js").then((module) => module.echarts));

export const COLOURS = ["#0f766e", "#d97706", "#4f46e5", "#be185d", "#65a30d", "#0284c7"];
const ON_DARK = ["#2dd4bf", "#fbbf24", "#a5b4fc", "#f472b6", "#a3e635", "#38bdf8"];
const dark = () => document.body.classList.contains("body--dark");

export default {
  props: { title: String, option: Object, label: String },
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
        h("div", { class: "canvas", ref: holder }),
      ]);
  },
};

export function lines(times, series, { unit = "", max } = {}) {
  return {
    backgroundColor: "transparent",
    grid: { left: 12, right: 26, top: 28, bottom: 4, containLabel: true },
    legend: { top: 0, right: 0, itemHeight: 8, textStyle: { fontSize: 11 } },
    tooltip: { trigger: "axis", valueFormatter: (v) => (v == null ? "–" : `${Number(v.toPrecision(3))}${unit}`) },
    xAxis: { type: "category", data: times, boundaryGap: false, axisLabel: { fontSize: 10 } },
    yAxis: { type: "value", min: 0, max, axisLabel: { fontSize: 10, formatter: (v) => `${v}${unit}` }, splitNumber: 3 },
    series: series.map(({ name, data }) => ({ name, data, type: "line", showSymbol: false, connectNulls: false, areaStyle: { opacity: 0.08 } })),
  };
}
