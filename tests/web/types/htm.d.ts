declare const htm: { bind(h: unknown): (parts: TemplateStringsArray, ...values: unknown[]) => unknown };
export default htm;
