from __future__ import annotations
import sys, warnings
warnings.filterwarnings("ignore")
from collections import Counter
import numpy as np, onnx, onnx_ir as ir, onnxruntime as ort
from onnx.backend.test.loader import load_model_tests
from onnx import numpy_helper
import gradfuse
from gradfuse.differentiation.differentiate import differentiate
from gradfuse.differentiation import rules
from differences import Differences, directions
import os
F={1,10,11,16}
def cases():
    for c in load_model_tests(kind="node"):
        yield c
def load(c):
    m=c.model
    if m is None or not c.data_sets: return m,None
    ins=c.data_sets[0][0]
    if any(not i.type.HasField("tensor_type") for i in m.graph.input): return m,None
    return m,{i.name:np.asarray(a) for i,a in zip(m.graph.input,ins)}
def one(c):
    m,feeds=load(c)
    if feeds is None: return "not tensors",""
    if m.opset_import[0].domain not in("","ai.onnx"): return "domain",""
    if len({n.op_type for n in m.graph.node})>1 : return "several nodes",""
    fl=[i.name for i in m.graph.input if i.type.tensor_type.elem_type in (1,11)]
    out=[o.name for o in m.graph.output if o.type.tensor_type.elem_type in (1,11)]
    if not fl or not out: return "no float",""
    rng=np.random.default_rng(0)
    try:
        outs=ort.InferenceSession(m.SerializeToString(),providers=["CPUExecutionProvider"]).run(None,feeds)
    except Exception as e: 
        return "no ort", str(e)[:90]
    outs=dict(zip([o.name for o in m.graph.output],outs))
    seeds={o: rng.standard_normal(outs[o].shape) for o in out}
    wrt=list(fl)
    while wrt:
        try:
            g=differentiate(m,wrt,seeds={o:f"seed_{o}" for o in out}); break
        except gradfuse.ArgumentError as e:
            t=str(e)
            bad=[n for n in wrt if f"depend on {n!r}" in t]
            if not bad: return "argument",t
            wrt.remove(bad[0])
        except gradfuse.ModelError as e: return "model", str(e)[:150]
    if not wrt: return "no derivative",""
    try:
        s=ort.InferenceSession(g.SerializeToString(),providers=["CPUExecutionProvider"])
        got=dict(zip([o.name for o in s.get_outputs()],s.run(None,{**feeds,**{f"seed_{o}":a.astype(outs[o].dtype) for o,a in seeds.items()}})))
    except Exception as e: return "cannot run", str(e)[:200]
    try:
        d=Differences(m,seeds)
        for n in wrt:
            if not feeds[n].size: continue
            for v in directions(feeds[n].shape,3,rng):
                w=d.along(feeds,n,v); h=float((got[n+".grad"].astype(np.float64)*v).sum())
                scale=max(1e-3,float(np.abs(got[n+".grad"]).max()), abs(w))
                if got[n+".grad"].shape!=feeds[n].shape: return "shape",n
                if not abs(w-h)<=1e-4*scale*max(1,np.sqrt(v.size)): return "WRONG",f"{n} {h} for {w}"
    except Exception as e: return "no reference", repr(e)[:100]
    return "ok",""
if __name__=="__main__":
    cnt=Counter(); 
    for c in cases():
        if len(sys.argv)>1 and not any(a in c.name for a in sys.argv[1:]): continue
        if c.name.endswith("_expanded"): continue
        try: r=one(c)
        except Exception as e:
            import traceback
            r=("TRACE",traceback.format_exc()[-300:].replace("\n"," | "))
        cnt[r[0]]+=1
        if r[0] not in("ok","no float","no derivative","not tensors","domain","several nodes"): print(c.name,*r,flush=True)
    print(cnt)
